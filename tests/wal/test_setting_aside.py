"""A log that is no longer the shard's is kept apart, whatever crash comes in between, and another takes its place."""

from __future__ import annotations

from typing import Final

import msgspec
import pytest

from forebay.format.metadata.descriptor import ShardState
from forebay.records import Gap, Reason
from forebay.shard import RecoveryDecision, Situation, decide
from forebay.testing.checks.history import AppendOutcome
from forebay.testing.checks.invariants import names_follow_bytes
from forebay.testing.simulated.crashes import CrashState, explore
from forebay.topics import Durability
from forebay.wal.recovery.resume import ASIDE, Start, set_aside
from forebay.wal.recovery.survey import Survey
from tests.ledger import Ledger
from tests.wal.rig import DIRECTORY, ROOT, TOPIC_ID, Bare, BareRig, simulated

FSYNC, DISK = Durability.FSYNC, Durability.DISK
FRONTIER, RESERVED = 40, 64
TAKEN: Final = ShardState(
    incarnation=TOPIC_ID, epoch=5, owner="gone", holder="elsewhere", holder_since=5, reserved_end=RESERVED
)
"""Another directory wrote last and is gone: it had exported up to the frontier, and reserved more."""


def _decide(facts: Survey, state: ShardState) -> RecoveryDecision:
    here = Situation("shop/orders[0]", FSYNC, "", ROOT, frontier=FRONTIER, shared=True, covered=FRONTIER)
    return decide(facts, state, here)


def _take_over(rig: Bare, state: ShardState) -> RecoveryDecision:
    """Open the shard as the owner that follows `state`."""
    rig.epoch = state.epoch
    facts = rig.surveyed()
    decision = _decide(facts, state)
    start = Start(next_offset=decision.next_offset, gap=decision.gap, set_aside=decision.set_aside)
    rig.begin(start, facts=facts, reserve=lambda end: end, reserved_end=RESERVED)
    return decision


def _old_log(durability: Durability = FSYNC) -> Bare:
    """Three sealed files and an active one, ended in order."""
    rig = BareRig(simulated(), durability).begin()
    rig.fill(3)
    rig.upkeep.close()
    return rig


def _contents(rig: Bare) -> dict[str, bytes]:
    """Every segment of the directory."""
    names = [name for name in rig.disk.list_directory(DIRECTORY) if name.endswith(".seg")]
    files = [rig.disk.open(f"{DIRECTORY}/{name}") for name in names]
    return {name: file.read_at(file.size(), 0) for name, file in zip(names, files, strict=True)}


def test_a_take_over_keeps_the_old_files_apart_and_begins_at_the_reserved_end() -> None:
    old = _old_log()
    contents = _contents(old)
    rig = BareRig(old.disk, FSYNC)

    decision = _take_over(rig, TAKEN)

    assert decision.set_aside
    kept = rig.disk.list_directory(f"{DIRECTORY}/{ASIDE}")
    assert sorted(name for name in kept if name.endswith(".seg")) == sorted(contents)
    assert [name for name in kept if name in ("live", "checkpoint")] == ["checkpoint", "live"]
    assert len([name for name in kept if name.endswith(".idx")]) == 3
    assert rig.disk.list_directory(DIRECTORY) == [ASIDE]
    assert rig.append() is AppendOutcome.ACKED
    assert rig.wal.files.begins == FRONTIER
    assert rig.reading_from(FRONTIER).steps == (Gap(FRONTIER, RESERVED, Reason.LOST), (RESERVED, b"a0.0"))
    assert rig.wal.writer.window.last_sequence(1) is None


def test_a_name_that_is_taken_aside_gets_a_number_and_nothing_is_overwritten() -> None:
    rig = _old_log()
    first = set_aside(rig.disk, DIRECTORY)
    for name in ("00000000000000000000-00000001.seg", "live"):
        rig.disk.create(f"{DIRECTORY}/{name}").write_at(b"again", 0)
    rig.disk.create(f"{DIRECTORY}/{ASIDE}/live.1")

    second = set_aside(rig.disk, DIRECTORY)

    assert [path.rpartition("/")[2] for path in second] == ["00000000000000000000-00000001.seg.1", "live.2"]
    assert rig.disk.open(second[0]).read_at(9, 0) == b"again"
    assert all(rig.disk.open(path).size() > 5 for path in first)
    assert set_aside(rig.disk, DIRECTORY) == []
    assert set_aside(rig.disk, "/nowhere") == []


@pytest.mark.slow
@pytest.mark.parametrize("durability", [FSYNC, DISK])
def test_no_crash_while_files_are_set_aside_changes_the_decision_or_loses_a_byte(
    durability: Durability, ledger: Ledger
) -> None:
    old = _old_log(durability)
    contents = set(_contents(old).values())
    rig = BareRig(old.disk, durability, seed="aside")
    begun = len(rig.disk.trace)
    first = _take_over(rig, TAKEN)
    rig.append(2)

    # `live` is never synced: it only helps while its writer lives.
    assert [found for found in names_follow_bytes(rig.disk.trace) if not found.message.startswith("live ")] == []
    # This directory has acquired the shard by now, and died before or after its first record.
    again = msgspec.structs.replace(TAKEN, epoch=6, holder=ROOT, holder_since=6)
    for state in explore(rig.disk.trace, range(begun, len(rig.disk.trace) + 1), states_max=10, names_max=16):
        ledger.count("crash states", scenario="set aside", damage=state.damage.value)
        _judge(state, durability, again, first, contents)


def _judge(
    state: CrashState, durability: Durability, recorded: ShardState, first: RecoveryDecision, contents: set[bytes]
) -> None:
    rig = BareRig(state.disk(), durability)
    facts = rig.surveyed()
    if facts.epoch != recorded.epoch:
        # The new log has not begun: it begins where it would have.
        decision = _decide(facts, recorded)
        assert (decision.next_offset, decision.gap) == (first.next_offset, first.gap), str(state)
        _take_over(rig, recorded)
        assert rig.append() is AppendOutcome.ACKED
        assert rig.reading_from(FRONTIER).records == [(RESERVED, b"a0.0")]
        assert not any(name.endswith(".idx") for name in rig.disk.list_directory(DIRECTORY))
    aside = f"{DIRECTORY}/{ASIDE}"
    kept = [rig.disk.open(f"{aside}/{name}") for name in rig.disk.list_directory(aside) if ".seg" in name]
    # A move that only half happened leaves both names; the second is kept too.
    assert {file.read_at(file.size(), 0) for file in kept} == contents, str(state)


def test_an_index_without_its_segment_is_a_leftover_and_the_shard_is_empty() -> None:
    rig = _old_log()
    for name in list(_contents(rig)):
        rig.disk.unlink(f"{DIRECTORY}/{name}")
    facts = rig.surveyed()

    assert facts.is_empty
    assert (facts.begins, facts.end, facts.damage) == (0, 0, [])
    assert len(facts.leftovers) == 5  # three indexes, live, checkpoint
    again = BareRig(rig.disk, FSYNC, epoch=1).begin(Start(next_offset=10), facts=facts)
    assert rig.disk.list_directory(DIRECTORY) == []
    assert again.append() is AppendOutcome.ACKED
    assert again.surveyed().begins == again.wal.files.begins == 10


def test_what_lies_before_the_first_file_is_no_damage_of_the_log() -> None:
    rig = _old_log()
    first, second, *_ = _contents(rig)
    rig.disk.unlink(f"{DIRECTORY}/{first}")
    facts = rig.surveyed()
    assert (facts.begins, facts.damage) == (3, [])
    assert facts.leftovers == [first.replace(".seg", ".idx")]

    rig.disk.unlink(f"{DIRECTORY}/{second}")
    assert (rig.surveyed().begins, rig.surveyed().damage) == (6, [])


def test_what_lies_between_two_files_still_is() -> None:
    rig = _old_log()
    _, second, *_ = _contents(rig)
    rig.disk.unlink(f"{DIRECTORY}/{second}")

    assert (rig.surveyed().begins, rig.surveyed().damage) == (0, [Gap(3, 6, Reason.DAMAGED)])
