"""A consumer in another process: it reads, and its places are kept, whatever the metadata store is made of."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

import forebay
import forebay.aio
from forebay import EARLIEST, Conflict, Invalid, Storage, Unavailable, Unsupported
from forebay.metadata import Delete, DeleteRange, Operation, Put
from forebay.storage.consumer_metadata import ConsumerMetadata
from forebay.testing.inside import inside
from tests.looking import EXPORTED, GROUP, TOPIC, VALUES, begin_owner, end_owner, recorded, settings_of, shared
from tests.storage.rig import QUICK, values


def metadata_of(log: Storage) -> ConsumerMetadata:
    metadata = inside(log).metadata
    assert isinstance(metadata, ConsumerMetadata)
    return metadata


def test_a_reader_beside_the_owner_acknowledges_and_the_owner_sees_it(tmp_path: Path) -> None:
    """Seen from outside: on SQLite every acknowledgement of a read-only log was refused, on etcd it was taken."""
    with forebay.open(tmp_path / "log", QUICK) as log, forebay.open(tmp_path / "log", QUICK, read_only=True) as beside:
        topic = log.create_topic("t", partitions=2)
        topic.append_many([b"%d" % number for number in range(5)], partition=0)
        reader = beside.topic("t").reader("r")

        for record in reader.read(partition=0):
            assert reader.ack(record, note="read") == record.offset + 1

        seen = topic.reader("r")
        assert (seen.offset(), seen.note(), reader.offset()) == (5, "read", 5)
        assert reader.ack_up_to(2) == 5
        with pytest.raises(Invalid, match="ends at 5"):
            reader.ack_up_to(6)
        assert reader.reset(EARLIEST) == 0
        assert seen.offset() == 0
        reader.forget()
        assert seen.offset() is None


def test_a_group_beside_the_owner_commits_durably_and_cached(tmp_path: Path) -> None:
    slow = {**QUICK, "progress": {"flush_interval_ms": 600_000}}
    with forebay.open(tmp_path / "log", slow) as log:
        log.create_topic("t").append_many([b"v"] * 5)
        with forebay.open(tmp_path / "log", slow, read_only=True) as beside:
            group = beside.group("g")
            assert group.commit("t", 2) == 2
            with pytest.raises(Conflict):
                group.commit("t", 4, expected=1)
            assert group.commit("t", 3, expected=2) == 3
            assert group.commit("t", 4, ack="cached") == 4
            assert (group.fetch("t"), log.group("g").fetch("t")) == (4, 3)
            assert group.offsets()[0].lag == 1
        assert log.group("g").fetch("t") == 4, "closing writes what is cached"
        with forebay.open(tmp_path / "log", slow, read_only=True) as beside:
            assert beside.group("g").reset("t", 1) == {0: 1}
            assert beside.group("g").delete() == 1
        assert log.groups() == []


def test_nothing_but_cursors_is_written_by_a_read_only_log(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log, forebay.open(tmp_path / "log", QUICK, read_only=True) as beside:
        topic = log.create_topic("t")
        topic.append(b"v")
        before = inside(log).metadata.revision()
        seen = beside.topic("t")
        list(seen.read())
        assert metadata_of(beside)._writing is None, "one who only reads needs no permission to write"
        with pytest.raises(Unsupported):
            beside.create_topic("other")
        with pytest.raises(Unsupported):
            seen.append(b"v")
        key, cursor = "/forebay/topics/default/t", "/forebay/progress/default/t/r/0"
        refused: list[list[Operation]] = [
            [Put(key, b"x")],
            [Delete(key)],
            [DeleteRange("/forebay/progress/")],
            [Put(cursor, b"x"), Delete(key)],
        ]
        for operations in refused:
            with pytest.raises(Unsupported, match="places of readers and groups"):
                metadata_of(beside).transaction([], operations)
        with pytest.raises(Unsupported):
            metadata_of(beside).session(5)
        assert inside(log).metadata.revision() == before


CONSUMER = """
import sys, json, forebay
with forebay.open(None, json.loads(sys.argv[1]), read_only=True) as log:
    reader = log.topic(sys.argv[2]).reader("far")
    for record in reader.read():
        reader.ack(record)
    print(reader.offset(), log.group(sys.argv[3]).offsets()[0].end, log.path, log.directory_id)
"""


@pytest.mark.slow
def test_a_consumer_in_a_process_without_a_directory_reads_history_and_acknowledges(tmp_path: Path) -> None:
    owner = begin_owner(tmp_path, "wait")
    before, files = recorded(tmp_path), sorted(path.name for path in tmp_path.iterdir())

    words = [sys.executable, "-c", CONSUMER, json.dumps(shared(tmp_path)), TOPIC, GROUP]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path)

    assert done.stdout.split() == [str(EXPORTED), str(EXPORTED), "None", "None"]
    assert recorded(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    end_owner(owner)
    with forebay.open(tmp_path / "a", settings_of(tmp_path)) as log:
        assert values(log.topic(TOPIC).reader("far").read()) == VALUES[EXPORTED:]


def test_a_consumer_without_a_directory_follows_what_the_owner_exports_in_an_event_loop_too(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)

    async def main(owner: Storage) -> None:
        async with asyncio.timeout(60), forebay.aio.open(None, settings, read_only=True) as log:
            reader = (await log.topic("t")).reader("r")
            stream = reader.follow()
            for number in range(3):
                owner.topic("t").append(b"%d" % number)
                owner.export_topic("t")
                record = await anext(stream)
                assert record.value == b"%d" % number
                assert await reader.ack(record) == number + 1
            await stream.aclose()

    with forebay.open(tmp_path / "a", settings) as owner:
        owner.create_topic("t")
        asyncio.run(main(owner))
        assert owner.topic("t").reader("r").offset() == 3


def test_a_log_without_a_directory_is_refused_where_it_could_read_nothing(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="read_only=True"):
        forebay.open(None, settings_of(tmp_path))
    with pytest.raises(Invalid, match=r"storage\.mode"):
        forebay.open(None, QUICK, read_only=True)
    with pytest.raises(Invalid, match=r"metadata\.path"):
        forebay.open(None, {"storage": {"mode": "shared_fs"}, "store": {"root": f"{tmp_path}/history"}}, read_only=True)
    with pytest.raises(Unavailable, match="no metadata database"):
        forebay.open(None, settings_of(tmp_path), read_only=True)
    assert list(tmp_path.iterdir()) == []
