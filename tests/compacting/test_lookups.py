"""Look-ups of whichever caller knew history before it was compacted find the same records behind it."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from forebay.engines.readonly import FollowedShard
from forebay.history import History, InHistory
from forebay.storage import Topic
from forebay.testing.inside import inside
from tests.compacting.directly import compacted
from tests.support.environments import directories
from tests.support.environments.directories import Environment

TOPIC = "shop/orders"


@pytest.fixture(params=["local", "shared_fs"])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    return directories.local(tmp_path) if request.param == "local" else directories.shared_fs(tmp_path)


def _by_key(topic: Topic) -> list[int]:
    return [record.offset for key in (3, 13, 23) for record in topic.read_by_key(b"%d" % key)]


def _history(topic: Topic) -> History:
    shard = inside(topic).read_shard(0)
    return inside(shard).past.history if isinstance(shard, FollowedShard) else inside(topic).history().segments


def test_files_and_objects_that_went_since_are_found_elsewhere(environment: Environment) -> None:
    with environment.open("one") as log:
        topic = log.create_topic(TOPIC)
        for base in (0, 10, 20):
            keys = [b"%d" % number for number in range(base, base + 10)]
            topic.append_many(keys, keys=keys, partition=0)
            log.export_topic(TOPIC)
        topic.append(b"last", partition=0)
        with environment.open("one", read_only=True) as beside:
            topics = [topic, beside.topic(TOPIC)]
            for each in topics:
                assert [record.offset for record in each.read(stop=30, partition=0)] == list(range(30))
                assert _by_key(each) == [3, 13, 23]
                _history(each).refresh()
            compacted(environment)
            assert inside(topic).drop_sealed() == 3
            for path in (environment.root / "store").rglob("*.seg"):
                path.unlink()

            for each in topics:
                assert _by_key(each) == [3, 13, 23]


def test_history_is_known_to_be_compacted_before_the_files_of_it_go(tmp_path: Path) -> None:
    environment = directories.local(tmp_path)
    with environment.open("one") as log:
        topic = log.create_topic(TOPIC)
        for _ in range(3):
            topic.append_many([b"value"] * 10, partition=0)
            log.export_topic(TOPIC)
        topic.append(b"last", partition=0)
        history = directories.shard_of(topic).history
        history.segments.refresh()

        def just_now() -> int:
            compacted(environment)
            return 0

        with mock.patch.object(history, "_drop_ended", just_now):
            assert history.retain() == 3

        found = history.segments.cover(0, 30)
        held = [span.tier.open().held(*span[:2]) for span in found if isinstance(span.tier, InHistory)]
        assert sum(map(len, held)) == 30
