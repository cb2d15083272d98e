"""`forebay verify` of topics on engine `rocksdb`: what it finds, where, and that it changes nothing."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import forebay
from forebay.disk import SystemDisk
from forebay.engines.rocksdb import auditing
from forebay.engines.rocksdb.database import RocksBatch, RocksDatabase
from forebay.engines.rocksdb.layout import (
    Bounds,
    Keys,
    ShardCounters,
    encode_appended,
    encode_deleted,
    encode_gap,
    encode_time,
    with_offset,
)
from forebay.inspection import Report
from forebay.inspection.verify.database import verify_database
from forebay.records import Reason
from tests.cli.rig import Outcome, Shell, flip, snapshot
from tests.ledger import Ledger
from tests.support.soak import SOAK

pytestmark = pytest.mark.slow

RECORDS: Final = 300
FLIPS: Final = 200 if SOAK else 6


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the topic shop/carts on rocksdb, in one partition: appended, deleted and dropped from."""
    directory = tmp_path_factory.mktemp("sound") / "log"
    with forebay.open(str(directory)) as log:
        carts = log.create_topic("shop/carts", engine="rocksdb", durability="fsync")
        for start in range(0, RECORDS, 10):
            numbers = range(start, start + 10)
            carts.append_many(
                [b"%d" % number for number in numbers],
                keys=[b"k%d" % (number % 50) for number in numbers],
                tags=[f"t{number % 3}" for number in numbers],
                timestamps=[1_000 + number for number in numbers],
            )
        carts.delete_by_key(b"k7")
        carts.delete_before(70)
    return directory


@pytest.fixture
def shell(sound: Path, tmp_path: Path) -> Shell:
    """That directory, to be changed."""
    shutil.copytree(sound, tmp_path / "log")
    return Shell(tmp_path / "log")


def errors(outcome: Outcome) -> list[dict[str, Any]]:
    return [item for item in outcome.items if item.get("severity") == "error"]


def keys_of(shell: Shell) -> Keys:
    with forebay.open(str(shell.directory), read_only=True) as log:
        (spec,) = log.topics()
    return Keys(spec.topic_id, 0)


def rewritten(shell: Shell, change: Callable[[RocksBatch, Keys], None]) -> None:
    """Change rows behind the back of the engine."""
    keys = keys_of(shell)
    database = RocksDatabase(str(shell.directory / "rocksdb"), SystemDisk())
    batch = database.batch()
    change(batch, keys)
    database.write(batch, sync=True)
    database.close()


def test_a_sound_database_is_found_sound_and_not_changed(shell: Shell) -> None:
    before = snapshot(shell.directory)

    summary = shell.ok("verify", "--json").items[-1]

    assert (summary["shards"], summary["findings"]) == (1, 0)
    # 70 to 299, without 107, 157, 207 and 257.
    assert summary["records"] == 230 - 4
    assert summary["bytes"] > 0
    assert snapshot(shell.directory) == before


@pytest.mark.slow
def test_flipped_bytes_of_rows_are_noticed_and_nothing_is_changed(shell: Shell, tmp_path: Path, ledger: Ledger) -> None:
    crashed = Shell(tmp_path / "crashed")
    with forebay.open(str(shell.directory)) as log:
        log.topic("shop/carts").append(b"last", key=b"k")
        shutil.copytree(shell.directory, crashed.directory)
    missed = []
    for path in [*crashed.directory.glob("rocksdb/*.sst"), *crashed.directory.glob("rocksdb/*.log")]:
        size = path.stat().st_size
        for byte in range(0, size, max(1, size // FLIPS)):
            flip(path, byte)
            before = snapshot(crashed.directory)
            outcome = crashed.run("verify", "--json")
            if outcome.code != 6 or not errors(outcome):
                missed.append((path.name, byte, outcome.out))
            assert snapshot(crashed.directory) == before
            flip(path, byte)
            ledger.count("flips")

    assert missed == []
    assert crashed.ok("verify").out.startswith("all sound")


def _no_entry(batch: RocksBatch, keys: Keys) -> None:
    batch.delete(keys.entry(130))


def _two_entries(batch: RocksBatch, keys: Keys) -> None:
    batch.put(keys.entry(135), encode_gap(140, Reason.LOST, before=0))


def _foreign_records(batch: RocksBatch, keys: Keys) -> None:
    batch.put(keys.entry(130), bytes(24) + b"no frame")


def _short_entry(batch: RocksBatch, keys: Keys) -> None:
    batch.put(keys.entry(130), b"short")


def _backward_gap(batch: RocksBatch, keys: Keys) -> None:
    batch.put(keys.entry(130), encode_gap(120, Reason.LOST, before=0))


def _too_many_sizes(batch: RocksBatch, keys: Keys) -> None:
    stub = encode_deleted(np.ones(10, np.int64), appended_at=0, before=0)
    batch.put(keys.entry(130), stub + bytes(4))


def _no_counters(batch: RocksBatch, keys: Keys) -> None:
    batch.delete(keys.counters)


def _short_counters(batch: RocksBatch, keys: Keys) -> None:
    batch.put(keys.counters, b"\1short")


def _high_counters(batch: RocksBatch, keys: Keys) -> None:
    batch.put(keys.counters, ShardCounters(next=310, earliest=70, live=226).encode())


def _high_floor(batch: RocksBatch, keys: Keys) -> None:
    batch.put(keys.counters, ShardCounters(next=300, earliest=70, evict_floor=80).encode())


def _short_bounds(batch: RocksBatch, keys: Keys) -> None:
    batch.put(keys.bounds, b"\1short")


def _remembered(batch: RocksBatch, keys: Keys) -> None:
    batch.put(keys.appended(1, 0), encode_appended(5, 298))


def _badly_remembered(batch: RocksBatch, keys: Keys) -> None:
    batch.put(keys.appended(1, 0), b"short")


@pytest.mark.parametrize(
    ("change", "said", "offsets"),
    [
        (_no_entry, "no entry holds", [130, 140]),
        (_two_entries, "two entries hold", [135, 140]),
        (_foreign_records, "ends at 130", [130, 131]),
        (_short_entry, "is damaged in the database", [130, 131]),
        (_backward_gap, "ends at 120", [130, 131]),
        (_too_many_sizes, "sizes of 11 records, not of 10", [130, 140]),
        (_no_counters, "end at different offsets", [0, 300]),
        (_short_counters, "counters of a shard are damaged", None),
        (_high_counters, "end at different offsets", [300, 310]),
        (_high_floor, "contradict each other", None),
        (_short_bounds, "bounds of a shard are damaged", None),
        (_remembered, "producer 1", [298, 303]),
        (_badly_remembered, "what is remembered of producers", None),
    ],
)
def test_what_is_wrong_with_records_is_named_and_a_backup_asked_for(
    shell: Shell, change: Callable[[RocksBatch, Keys], None], said: str, offsets: list[int] | None
) -> None:
    rewritten(shell, change)

    outcome = shell.run("verify", "--json")

    found = errors(outcome)
    assert outcome.code == 6
    assert any(said in finding["what"] and finding.get("offsets") == offsets for finding in found), found
    assert {finding["shard"] for finding in found} == {"shop/carts[0]"}
    assert {finding["next_step"] for finding in found} == {"restore the directory rocksdb from a backup"}


def _other_count(batch: RocksBatch, keys: Keys) -> None:
    batch.put(keys.counters, ShardCounters(next=300, earliest=70, live=5, total=9_000, below=1_860).encode())


def _not_in_index(batch: RocksBatch, keys: Keys) -> None:
    batch.delete(with_offset(keys.of_key(b"k5"), 105))
    batch.delete(with_offset(keys.of_tag("t1"), 106))


def _no_index(batch: RocksBatch, keys: Keys) -> None:
    for rows in keys.lookups:
        batch.delete_range(*rows)


def _only_in_index(batch: RocksBatch, keys: Keys) -> None:
    batch.put(with_offset(keys.of_key(b"k7"), 107), b"")


def _no_time(batch: RocksBatch, keys: Keys) -> None:
    batch.delete(keys.block(0, 2))


def _old_time(batch: RocksBatch, keys: Keys) -> None:
    batch.put(keys.block(0, 2), encode_time(1_100))


def _new_time(batch: RocksBatch, keys: Keys) -> None:
    batch.put(keys.block(0, 2), encode_time(5_000))


def _old_time_at_the_floor(batch: RocksBatch, keys: Keys) -> None:
    batch.put(keys.block(0, 1), encode_time(1_100))


def _time_of_nothing(batch: RocksBatch, keys: Keys) -> None:
    batch.put(keys.block(1, 7), encode_time(1_000))


@pytest.mark.parametrize(
    ("change", "said", "offsets"),
    [
        (_other_count, "226 records are live", None),
        (_not_in_index, "2 live records are not in the index", [105, 107]),
        (_only_in_index, "1 entries of the index", [107, 108]),
        (_no_time, "the time index says None", [128, 192]),
        (_old_time, "the time index says 1100", [128, 192]),
        (_new_time, "the time index says 5000", [128, 192]),
        (_old_time_at_the_floor, "the time index says 1100", [64, 128]),
        (_time_of_nothing, "1 blocks without a record", None),
    ],
)
def test_what_is_wrong_with_indexes_alone_is_distinguished(
    shell: Shell, change: Callable[[RocksBatch, Keys], None], said: str, offsets: list[int] | None
) -> None:
    rewritten(shell, change)

    outcome = shell.run("verify", "--json")

    (finding,) = errors(outcome)
    assert outcome.code == 6
    assert said in finding["what"] and finding.get("offsets") == offsets
    assert "forebay topic copy" in finding["next_step"]


def test_a_copy_of_a_topic_has_its_indexes_again(shell: Shell) -> None:
    rewritten(shell, _no_index)

    shell.ok("topic", "copy", "shop/carts", "shop/again", "--engine", "rocksdb")
    again = shell.ok("verify", "shop/again", "--json")

    assert again.items[-1]["records"] == 226


def test_of_an_index_that_is_wrong_everywhere_only_the_first_stretches_are_reported_in_full(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditing, "STRETCH_BITS", 4)
    rewritten(shell, _no_index)

    found = errors(shell.run("verify", "--json"))

    # Each record of [70, 192) has a key and a tag; 107 and 157 are gone.
    assert found[0]["what"].startswith("240 live records") and found[0]["offsets"] == [70, 192]
    assert "wrong in 7 stretches more" in found[1]["what"] and found[1]["offsets"] == [192, 304]


def test_a_database_that_is_gone_is_named_by_each_shard_it_had(shell: Shell) -> None:
    shell.ok("topic", "create", "shop/new", "--engine", "rocksdb")
    shutil.rmtree(shell.directory / "rocksdb")

    outcome = shell.run("verify", "--json")

    (finding,) = errors(outcome)
    assert outcome.code == 6 and finding["shard"] == "shop/carts[0]"
    assert "is not in the database" in finding["what"]


def test_a_shard_that_is_not_in_the_database_is_named(shell: Shell) -> None:
    rewritten(shell, lambda batch, keys: batch.delete_range(keys.start, keys.stop))

    (finding,) = errors(shell.run("verify", "--json"))

    assert "is not in the database" in finding["what"]


def test_a_shard_of_no_topic_is_a_warning(shell: Shell) -> None:
    stranger = Keys("0" * 31 + "1", 3)
    rewritten(shell, lambda batch, _: batch.put(stranger.bounds, Bounds().encode()))

    outcome = shell.ok("verify", "--json")
    (warning,) = [item for item in outcome.items if item.get("severity") == "warning"]

    assert "partition 3 of topic id 0000" in warning["what"]


def test_metadata_older_than_the_database_is_an_error(shell: Shell) -> None:
    rewritten(shell, lambda batch, keys: batch.put(keys.bounds, Bounds(epoch=9).encode()))

    (finding,) = errors(shell.run("verify", "--json"))

    assert "by epoch 9, the metadata store knows only 1" in finding["what"]


def test_a_newer_shard_is_no_damage_but_not_readable(shell: Shell) -> None:
    rewritten(shell, lambda batch, keys: batch.put(keys.counters, b"\xff"))

    (finding,) = errors(shell.run("verify", "--json"))

    assert finding["next_step"] == "upgrade: nothing is corrupt"


def test_without_the_package_it_is_said_that_not_all_was_checked(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.engines.rocksdb.database.find_spec", lambda name: None)

    outcome = shell.run("verify")

    assert outcome.code == 4 and "NOT ALL CHECKED" in outcome.out and "forebay[rocksdb]" in outcome.out


def test_verifying_beside_an_owner_that_goes_on(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "log")
    with forebay.open(str(shell.directory)) as log:
        topic = log.create_topic("t", engine="rocksdb", partitions=2)
        for turn in range(5):
            for number in range(100):
                topic.append(b"%d" % number * 10, key=b"%d" % number)

            outcome = shell.run("verify", "--json")

            assert outcome.code == 0, outcome.out
            assert outcome.items[-1]["records"] == (turn + 1) * 100


def test_a_topic_that_comes_while_verify_is_at_work_is_no_stranger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = Shell(tmp_path / "log")
    with forebay.open(str(shell.directory)) as log:
        log.create_topic("t", engine="rocksdb").append(b"0")

        def late(*arguments: Any, **more: Any) -> Report:
            log.create_topic("new", engine="rocksdb").append(b"1")
            return verify_database(*arguments, **more)

        monkeypatch.setattr(sys.modules["forebay.inspection.verify"], "verify_database", late)
        outcome = shell.ok("verify", "--json")

    assert [item for item in outcome.items if "severity" in item] == []
