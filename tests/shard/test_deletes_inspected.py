"""What `verify` and `dump` make of deletes, floors, and a history whose front has gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.metadata import Put
from forebay.records import Reason
from forebay.shard import SegmentShard
from forebay.storage import Storage
from tests.cli.rig import Shell
from tests.support.environments.directories import Environment, local, metadata_of, shard_of, shared_fs


def _shard(log: Storage) -> SegmentShard:
    return shard_of(log.topic("shop/orders"))


@pytest.fixture(params=["local", "shared_fs"])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    """A log with deletes on both sides of the frontier, and its front gone."""
    environment = local(tmp_path) if request.param == "local" else shared_fs(tmp_path)
    with environment.open("a") as log:
        topic = log.create_topic("shop/orders", partitions=1)
        for number in range(6):
            topic.append_many([b"%d.%d" % (number, place) for place in range(5)])
            _shard(log).rotate()
        log.export_topic("shop/orders")
        topic.append(b"last")
        shard = _shard(log)
        assert shard.deletes.delete_range(28, 31) == 3
        shard.deletes.evict_below(11, Reason.TTL)
        assert shard.history.retain() == 2
    return environment


def _run(environment: Environment, *words: str) -> list[dict[str, object]]:
    settings = [
        f"metadata.path={environment.settings.metadata.path}",
        f"storage.mode={environment.settings.storage.mode}",
        f"store.root={environment.settings.store.root}" if environment.settings.store.root else "",
        f"storage.handoff_root={environment.settings.storage.handoff_root}"
        if environment.settings.storage.handoff_root
        else "",
    ]
    given = [word for setting in settings if setting for word in ("--set", setting)]
    return Shell(environment.root / "a").run(*words, "--json", *given).items


def test_a_history_whose_front_has_ended_is_sound(environment: Environment) -> None:
    summary = _run(environment, "verify")[-1]

    assert (summary["clean"], summary["findings"]) == (True, 0)


def test_a_vector_that_contradicts_itself_is_named(environment: Environment) -> None:
    with environment.open("b", read_only=False) as log:
        store = metadata_of(log)
        (entry,) = store.range("/forebay/storage/topics/shop/orders/0/deletes/")
        store.transaction([], [Put(entry.key, entry.value.replace(b'"count":', b'"count":1'))])

    wrong = [str(item) for item in _run(environment, "verify") if item.get("severity") == "error"]

    assert any("deletes/" in item for item in wrong), wrong


@pytest.mark.parametrize("copies", [1, 2])
def test_a_damaged_delete_holds_by_its_second_copy_and_without_one_is_named_as_undone(
    tmp_path: Path, copies: int
) -> None:
    environment = local(tmp_path)
    with environment.open("a") as log:
        topic = log.create_topic("shop/orders", partitions=1)
        topic.append_many([b"%d" % place for place in range(5)])
        _shard(log).deletes.delete_range(1, 4)
        topic.append(b"behind")
    newest = max((environment.root / "a" / "shards").glob("*/*.seg"))
    places = [item["byte"] for item in _run(environment, "dump", str(newest)) if item["kind"] == "delete"]
    assert len(places) == 2
    content = bytearray(newest.read_bytes())
    for place in places[:copies]:
        assert isinstance(place, int)
        content[place + 60] ^= 1
    newest.write_bytes(content)

    found = [item for item in _run(environment, "verify") if "severity" in item]

    wanted = [
        (places[0], "note", "a frame without records"),
        (places[0], "error", "frames without records are damaged"),
    ]
    (said,) = [item for item in found if "without records" in str(item["what"])]
    assert (said["byte"], said["severity"]) == wanted[copies - 1][:2] and wanted[copies - 1][2] in str(said["what"])
    # Else the checkpoint of the clean stop says what was deleted, and the file is not walked.
    (newest.parent / "checkpoint").unlink()
    with environment.open("a") as log:
        topic = log.topic("shop/orders")
        left = [record.value for record in topic.read(0)]
        assert [place.byte for place in topic.recovery().undone] == (places[:1] if copies == 2 else [])
    assert left == ([b"0", b"4", b"behind"] if copies == 1 else [b"0", b"1", b"2", b"3", b"4", b"behind"])


def test_frames_of_deletes_and_floors_are_shown(environment: Environment) -> None:
    newest = max((environment.root / "a" / "shards").glob("*/*.seg"))
    frames = {item["kind"]: item for item in _run(environment, "dump", str(newest))}

    assert (frames["delete"]["deletes"], frames["delete"]["first"], frames["delete"]["last"]) == (1, 30, 30)
