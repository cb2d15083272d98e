"""What is left where topics are handed over goes after its grace, whether or not the topic is given up ever again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forebay import Unavailable
from forebay.catalog import ShardCatalog
from forebay.cleanup.objects import ObjectCleanup
from forebay.shard import SegmentShard
from forebay.storage import Storage
from forebay.testing.inside import inside
from tests.support.environments import directories
from tests.support.environments.directories import TOPIC, Environment, id_of, numbers, shard_of, told

pytestmark = pytest.mark.slow


def objects(environment: Environment) -> list[str]:
    """The segments in the directory where topics are handed over."""
    return sorted(path.name for path in (environment.root / "handoff").rglob("*.seg"))


def outlast_grace(environment: Environment) -> None:
    """Let what lies there be older than the grace."""
    for path in (environment.root / "handoff").rglob("*.*"):
        os.utime(path, (0, 0))


def step(log: Storage) -> None:
    """Do now what is due soon after a directory was opened."""
    inside(log).sweep_handoff()


def half_sealed(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic whose seal put a segment there and could not name it."""

    def refuse(*_: object, **__: object) -> None:
        raise Unavailable("the metadata store does not answer")

    with environment.open("A") as a:
        a.create_topic(TOPIC, durability="fsync").append_many([b"0", b"1", b"2"])
        monkeypatch.setattr(ShardCatalog, "replace", refuse)
        with pytest.raises(Unavailable):
            a.seal_topic(TOPIC)
        monkeypatch.undo()
    with environment.open("A") as a:
        assert told(a.topic(TOPIC).read()) == numbers(0, 3), "the seal is taken back"


def test_what_a_seal_that_was_not_finished_left_goes_after_its_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = directories.local(tmp_path)
    half_sealed(environment, monkeypatch)
    assert len(objects(environment)) == 1
    with environment.open("A") as a:
        step(a)
        assert len(objects(environment)) == 1, "within its grace"

    with environment.open("A") as a:
        # No caller has used the topic since.
        outlast_grace(environment)
        step(a)
        assert objects(environment) == []
        a.seal_topic(TOPIC)
        outlast_grace(environment)
        step(a)
        assert len(objects(environment)) == 1
    with environment.open("B") as b:
        assert b.topic(TOPIC).append(b"3") == 3
        step(b)
        assert told(b.topic(TOPIC).read()) == numbers(0, 4)


def test_another_directory_leaves_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = directories.local(tmp_path)
    half_sealed(environment, monkeypatch)
    outlast_grace(environment)

    with environment.open("B") as b:
        step(b)

        assert len(objects(environment)) == 1
        assert inside(b).shards() == []


def test_a_topic_that_has_nothing_there_but_its_history_is_not_opened_for_that(tmp_path: Path) -> None:
    environment = directories.local(tmp_path)
    with environment.open("A") as a:
        a.create_topic(TOPIC, durability="fsync").append_many([b"0", b"1", b"2"])
        a.seal_topic(TOPIC)
    with environment.open("B") as b:
        topic = b.topic(TOPIC)
        assert topic.append(b"3") == 3
    loaded = environment.root / "handoff" / f"{topic.spec.topic_id}_0" / "loads" / "one"
    loaded.mkdir(parents=True)
    (loaded / "1.seg").write_bytes(b"of a load")
    outlast_grace(environment)

    with environment.open("B") as b:
        step(b)

        assert inside(b).shards() == []


def test_whichever_caller_gives_a_topic_up_waits_for_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an object that the seal has just named again could go."""
    environment = directories.local(tmp_path)
    half_sealed(environment, monkeypatch)
    with environment.open("A") as a:
        worker, collect = inside(a).workers.history, ObjectCleanup.collect_owned
        at: list[bool] = []

        def collected(cleanup: ObjectCleanup, shard: SegmentShard) -> list[str]:
            at.append(worker.is_at(inside(a.topic(TOPIC)).shard()))
            return collect(cleanup, shard)

        with worker.paused(), inside(a).workers.cleanup.paused():
            monkeypatch.setattr(ObjectCleanup, "collect_owned", collected)
            outlast_grace(environment)
            step(a)
            monkeypatch.undo()

            assert at == [True]
            assert objects(environment) == []


def test_what_history_has_given_up_goes_there_too(tmp_path: Path) -> None:
    environment = directories.local(tmp_path)
    with environment.open("A") as a, environment.open("B") as b:
        topic = a.create_topic(TOPIC, durability="fsync")
        for start in (0, 3):
            topic.append_many([b"%d" % n for n in range(start, start + 3)])
            topic.rotate()
        a.seal_topic(TOPIC, target=id_of(b))
        here = b.topic(TOPIC)
        assert here.append(b"6") == 6
        assert len(objects(environment)) == 2
        here.delete_before(3)
        shard_of(here).history.retain()
        outlast_grace(environment)
        step(b)

        assert len(objects(environment)) == 1
        assert told(here.read(3)) == numbers(3, 7)
