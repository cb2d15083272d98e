"""The calls of an operator from Python: verify, repair and salvage give what the command line gives."""

from __future__ import annotations

from pathlib import Path

import pytest

import forebay
from forebay import Closed, Invalid, Moved, UnknownTopic, Unsupported
from forebay.inspection import Action, Severity
from tests.cli.environment import TOPIC, CommandEnvironment
from tests.cli.rig import filled, flip, snapshot
from tests.cli.test_salvage import _killed_owner
from tests.ledger import Ledger


def test_a_sound_directory_verifies_clean_beside_its_owner(tmp_path: Path) -> None:
    filled(tmp_path / "log")
    totals: list[int] = []
    read: list[int] = []

    with forebay.open(tmp_path / "log") as log:
        [spec] = log.topics()
        report = forebay.verify(
            tmp_path / "log", topic=spec.name, quick=True, on_total=totals.append, on_bytes=read.append
        )

    assert (report.is_clean, report.shards, report.records) == (True, 1, 60)
    assert len(totals) == 1 and sum(read) == totals[0]


def test_a_damaged_index_is_found_planned_for_and_mended(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    filled(directory)
    flip(min(directory.rglob("*.idx")), 60)
    before = snapshot(directory)

    report = forebay.verify(directory)
    planned = forebay.repair(directory, topic="shop/orders")

    assert not report.is_clean and "repair" in report.findings[0].next_step
    assert [step.action for step in planned] == [Action.REBUILD_INDEX, Action.REBUILD_CHECKPOINT]
    assert not any(step.done for step in planned) and snapshot(directory) == before

    done = forebay.repair(directory, apply=True)

    assert all(step.done for step in done)
    assert forebay.verify(directory).is_clean and forebay.repair(directory, apply=True) == []


def test_damage_that_was_accepted_is_named_with_no_repair_that_could_not_help(tmp_path: Path) -> None:
    settings = {"storage": {"mode": "shared_fs"}, "store": {"root": str(tmp_path / "history")}}
    with forebay.open(tmp_path / "log", {**settings, "export": {"at_close_seconds_max": 0}}) as log:
        topic = log.create_topic(TOPIC)
        for _ in range(3):
            topic.append_many([b"v" * 1000] * 10)
    flip(next((tmp_path / "log").rglob("*.seg")), 15_000)
    with forebay.open(tmp_path / "log", settings) as log:
        log.export_topic(TOPIC, accept_damage=True)

    report = forebay.verify(tmp_path / "log", settings)

    assert repr(report).startswith("Report(is_clean=True, findings=2, shards=1, ")
    assert {finding.severity for finding in report.findings} == {Severity.NOTE}
    assert [finding.offsets for finding in report.findings] == [(10, 20), (10, 20)]
    steps = [finding.next_step for finding in report.findings]
    assert not any("forebay repair" in step or "backup of the store" in step for step in steps)
    assert all("readers get this range reported as damaged" in step for step in steps)
    assert forebay.repair(tmp_path / "log", settings) == []


def test_damage_beside_what_was_accepted_is_an_error_as_ever(tmp_path: Path) -> None:
    settings = {"storage": {"mode": "shared_fs"}, "store": {"root": str(tmp_path / "history")}}
    with forebay.open(tmp_path / "log", {**settings, "export": {"at_close_seconds_max": 0}}) as log:
        topic = log.create_topic(TOPIC)
        for _ in range(4):
            topic.append_many([b"v" * 1000] * 10)
    damaged = next((tmp_path / "log").rglob("*.seg"))
    flip(damaged, 15_000)
    with forebay.open(tmp_path / "log", settings) as log:
        log.export_topic(TOPIC, accept_damage=True)
    flip(damaged, 35_000)

    report = forebay.verify(tmp_path / "log", settings)

    assert not report.is_clean
    errors = [finding for finding in report.findings if finding.severity is Severity.ERROR]
    assert [finding.offsets for finding in errors] == [(30, 40)]


@pytest.mark.parametrize("call", [forebay.verify, forebay.repair])
def test_a_topic_that_is_not_there_is_refused_by_name(tmp_path: Path, call: object) -> None:
    filled(tmp_path / "log")

    with pytest.raises(UnknownTopic, match="no topic shop/other"):
        call(tmp_path / "log", topic="shop/other")  # type: ignore[operator]
    with pytest.raises(Invalid, match="not a topic name"):
        call(tmp_path / "log", topic="a/b/c")  # type: ignore[operator]


@pytest.mark.slow
def test_lost_records_are_salvaged_once_by_the_log_that_has_the_topic(tmp_path: Path, ledger: Ledger) -> None:
    environment = CommandEnvironment(tmp_path)
    _killed_owner(environment, exported=10, appended=30)
    ledger.count("kills", figure="owner before a take-over")
    with environment.open("b") as log:
        log.topic(TOPIC).append(b"first of b")

        [would] = forebay.salvage(log, TOPIC, source=environment.root / "a", dry_run=True)
        [done] = forebay.salvage(log, TOPIC, source=environment.root / "a")
        [again] = forebay.salvage(log, TOPIC, source=environment.root / "a")
        [apart] = forebay.salvage(log, log.topic(TOPIC).spec.name, source=environment.root / "a", into="shop/rescued")

        assert (would.copied, would.present, would.into) == (20, 0, TOPIC)
        assert [(item.start, item.stop, item.lost) for item in would.files] == [(0, 10, 0), (10, 30, 20)]
        assert (done.copied, again.copied, again.present) == (20, 0, 20)
        assert (apart.copied, apart.into) == (20, "shop/rescued")
        assert [record.value for record in log.topic("shop/rescued").read()] == [b"%d" % n for n in range(10, 30)]
        with pytest.raises(Invalid, match="partition is 1"):
            forebay.salvage(log, TOPIC, partition=1)


def test_a_log_in_memory_has_nothing_to_salvage() -> None:
    with forebay.open(":memory:") as log:
        log.create_topic("shop/orders")

        with pytest.raises(Unsupported, match="memory"):
            forebay.salvage(log, "shop/orders")


@pytest.mark.parametrize("mode", ["shared_fs", "local"])
def test_a_topic_moves_to_another_directory_and_back(tmp_path: Path, mode: str) -> None:
    environment = CommandEnvironment(tmp_path, mode)
    steps: list[int] = []
    with environment.open("a") as log:
        topic = log.create_topic(TOPIC, partitions=2)
        topic.append_many([b"0", b"1"], partition=0)
        topic.append(b"x", partition=1)

        there = forebay.move_topic(log, topic.spec.name, tmp_path / "b", on_file=lambda lag: steps.append(lag.bytes))

        assert (there.topic, there.source, there.target) == (TOPIC, str(tmp_path / "a"), str(tmp_path / "b"))
        assert (there.next_offsets, there.is_taken, there.left) == ((2, 1), True, ())
        assert there.seconds is not None and steps
        with pytest.raises(Moved, match="was sealed here at offset 2"):
            topic.append(b"2", partition=0)
        again = forebay.move_topic(log, TOPIC, tmp_path / "b")
        assert (again.next_offsets, again.is_taken, again.seconds) == ((None, None), True, None)
    with environment.open("b") as log:
        assert log.topic(TOPIC).append(b"2", partition=0) == 2
        back = forebay.move_topic(log, TOPIC, tmp_path / "a")
        assert (back.next_offsets, back.is_taken) == ((3, 1), True)
    with environment.open("a") as log:
        assert [record.value for record in log.topic(TOPIC).read(partition=0)] == [b"0", b"1", b"2"]


def test_a_move_that_cannot_end_well_changes_nothing(tmp_path: Path) -> None:
    environment = CommandEnvironment(tmp_path, "shared_fs")
    with environment.open("a") as log:
        topic = log.create_topic(TOPIC)
        topic.append(b"0")

        with pytest.raises(Invalid, match="is to leave"):
            forebay.move_topic(log, TOPIC, tmp_path / "a")
        with pytest.raises(UnknownTopic):
            forebay.move_topic(log, "shop/other", tmp_path / "b")

        assert topic.append(b"1") == 1 and not (tmp_path / "b").exists()
    with forebay.open(":memory:") as log, pytest.raises(Unsupported):
        log.create_topic("t")
        forebay.move_topic(log, "t", tmp_path / "b")


def test_a_move_by_a_log_that_cannot_seal_makes_no_directory(tmp_path: Path) -> None:
    environment = CommandEnvironment(tmp_path, "shared_fs")
    with environment.open("a") as log:
        log.create_topic(TOPIC).append(b"0")
        for path in (tmp_path / "a", None):
            reading = forebay.open(path, environment.settings, read_only=True)
            with reading, pytest.raises(Unsupported, match="opened read-only"):
                forebay.move_topic(reading, TOPIC, tmp_path / "b")
        with pytest.raises(Invalid, match="no directory that a topic could move to"):
            forebay.move_topic(log, TOPIC, ":memory:")
    with pytest.raises(Closed):
        forebay.move_topic(log, TOPIC, tmp_path / "b")

    assert not (tmp_path / "b").exists() and not Path(":memory:").exists()


def test_a_log_without_a_directory_is_not_said_to_be_in_memory(tmp_path: Path) -> None:
    environment = CommandEnvironment(tmp_path, "shared_fs")
    with environment.open("a") as log:
        log.create_topic(TOPIC).append(b"0")

    reading = forebay.open(None, environment.settings, read_only=True)
    with reading, pytest.raises(Unsupported, match="has no data directory"):
        forebay.salvage(reading, TOPIC)
