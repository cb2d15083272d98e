"""The crash explorer itself, on hand-made traces whose outcomes are known."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

import pytest

from forebay.disk import Disk, make_directories, replace_file, write_all
from forebay.testing.simulated.crashes import CrashState, crash_states, explore
from forebay.testing.simulated.damage import POWER, CrashDamage
from forebay.testing.simulated.disk import SimulatedDisk, SimulatedFile
from forebay.testing.simulated.trace import Note


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk(directories=["/d", "/e"])


def test_an_unsynced_creation_may_vanish_though_its_bytes_were_synced(disk: SimulatedDisk) -> None:
    file = disk.create("/d/a")
    write_all(file, b"abc", 0)
    file.sync()

    assert _outcomes(disk, POWER) == {(), ("/d/a=abc",)}

    disk.sync_directory("/d")
    assert _outcomes(disk, POWER) == {("/d/a=abc",)}


def test_synced_bytes_survive_every_damage_to_what_came_after(disk: SimulatedDisk) -> None:
    file = _synced(disk, "/d/a", b"synced")
    file.write_at(b"later, unsynced", 6)
    file.write_at(b"and more", 21)

    states = list(crash_states(disk.trace, states_max=None))

    assert {state.damage for state in states} == set(CrashDamage)
    assert all(state.files()["/d/a"].startswith(b"synced") for state in states)
    assert len({state.digest() for state in states}) > 20


def test_each_damage_does_what_its_name_says(disk: SimulatedDisk) -> None:
    file = _synced(disk, "/d/a", b"S")
    file.write_at(b"abcd", 1)
    file.write_at(b"efgh", 5)

    assert _contents(disk, CrashDamage.OLD) == {b"S"}
    assert _contents(disk, CrashDamage.WHOLE) == {b"Sabcdefgh"}
    assert _contents(disk, CrashDamage.CUT) == {b"Sabcdefgh"[:end] for end in (1, 2, 3, 4, 5, 6, 7, 8)}
    assert _contents(disk, CrashDamage.HALF_ZERO) == {
        b"Sabcdef\0\0",
        b"Sabcd\0\0gh",
        b"Sab\0\0efgh",
        b"S\0\0cdefgh",
    }
    assert _contents(disk, CrashDamage.ALL_ZERO) == {b"S\0\0\0\0\0\0\0\0", b"Sabcd\0\0\0\0", b"S\0\0\0\0efgh"}
    assert _contents(disk, CrashDamage.REORDERED) == {b"S\0\0\0\0efgh"}
    garbled = _contents(disk, CrashDamage.GARBLED)
    assert len(garbled) == 6
    assert all(len(content) == 9 and (content[:5] == b"Sabcd") != (content[5:] == b"efgh") for content in garbled)


def test_cuts_fall_on_and_off_the_boundaries_that_formats_use(disk: SimulatedDisk) -> None:
    file = _synced(disk, "/d/a", bytes(100))
    file.write_at(bytes(1000), 100)

    lengths = {len(content) - 100 for content in _contents(disk, CrashDamage.CUT)}

    assert {0, 1, 8, 12, 16, 17, 500, 496, 512 - 100, 1024 - 100, 992, 999} == lengths


def test_sectors_of_one_write_may_arrive_out_of_order(disk: SimulatedDisk) -> None:
    file = _synced(disk, "/d/a", b"")
    file.write_at(b"1" * 512 + b"2" * 512 + b"3" * 100, 0)

    assert _contents(disk, CrashDamage.REORDERED) == {
        bytes(512) + b"2" * 512 + b"3" * 100,
        bytes(1024) + b"3" * 100,
    }


def test_a_truncation_may_be_lost_alone_or_with_what_followed(disk: SimulatedDisk) -> None:
    file = _synced(disk, "/d/a", b"abcdef")
    file.truncate(2)
    assert _contents(disk, *POWER) == {b"abcdef", b"ab"}

    file.write_at(b"XY", 2)
    assert _contents(disk, CrashDamage.OLD) == {b"abcdef"}
    assert _contents(disk, CrashDamage.REORDERED) == {b"abXYef"}
    assert _contents(disk, CrashDamage.WHOLE) == {b"abXY"}


def test_bytes_written_over_in_place_may_be_old_new_or_neither(disk: SimulatedDisk) -> None:
    file = _synced(disk, "/d/a", b"oldoldold")
    file.write_at(b"new", 3)

    contents = _contents(disk, *POWER)

    assert {b"oldoldold", b"oldnewold", b"old\0\0\0old"} <= contents
    assert all(content[:3] == content[6:] == b"old" for content in contents)


def test_a_rename_without_directory_sync_may_be_undone_and_moves_one_file(disk: SimulatedDisk) -> None:
    _synced(disk, "/d/a", b"A")
    _synced(disk, "/d/b", b"B")
    disk.rename("/d/a", "/d/b")

    assert _outcomes(disk, POWER) == {("/d/a=A", "/d/b=B"), ("/d/b=A",)}

    disk.sync_directory("/d")
    assert _outcomes(disk, POWER) == {("/d/b=A",)}


def test_renames_in_a_row_leave_the_file_at_one_place(disk: SimulatedDisk) -> None:
    _synced(disk, "/d/a", b"A")
    disk.rename("/d/a", "/d/b")
    disk.rename("/d/b", "/d/c")

    assert _outcomes(disk, POWER) == {("/d/a=A",), ("/d/b=A",), ("/d/c=A",)}


def test_a_created_and_renamed_file_is_at_either_name_or_nowhere(disk: SimulatedDisk) -> None:
    file = disk.create("/d/a.tmp")
    write_all(file, b"A", 0)
    file.sync()
    disk.rename("/d/a.tmp", "/d/a")

    assert _outcomes(disk, POWER) == {(), ("/d/a.tmp=A",), ("/d/a=A",)}


def test_a_rename_across_directories_needs_both_synced(disk: SimulatedDisk) -> None:
    _synced(disk, "/d/a", b"A")
    disk.rename("/d/a", "/e/a")
    assert _outcomes(disk, POWER) == {("/d/a=A",), ("/e/a=A",)}

    target_first = crash_states(_with(disk, lambda disk: disk.sync_directory("/e")).trace, damages=POWER)
    assert {_describe(state) for state in target_first} == {("/e/a=A",), ("/d/a=A", "/e/a=A")}

    source_first = crash_states(_with(disk, lambda disk: disk.sync_directory("/d")).trace, damages=POWER)
    assert {_describe(state) for state in source_first} == {("/e/a=A",)}


def test_a_durable_rename_is_not_undone_by_what_had_the_name_before(disk: SimulatedDisk) -> None:
    _synced(disk, "/d/a", b"A")
    disk.create("/e/a")
    disk.rename("/d/a", "/e/a")

    disk.sync_directory("/d")

    assert _outcomes(disk, POWER) == {("/e/a=A",)}


def test_unlinks_and_links_are_independent(disk: SimulatedDisk) -> None:
    _synced(disk, "/d/a", b"A")
    disk.link("/d/a", "/d/b")
    disk.unlink("/d/a")

    assert _outcomes(disk, POWER) == {("/d/a=A",), ("/d/a=A", "/d/b=A"), ("/d/b=A",), ()}


def test_linked_names_share_their_damaged_bytes(disk: SimulatedDisk) -> None:
    file = _synced(disk, "/d/a", b"A")
    disk.link("/d/a", "/d/b")
    disk.sync_directory("/d")
    file.write_at(b"BC", 1)

    for state in crash_states(disk.trace, damages=POWER):
        survivor = state.disk()
        survivor.open("/d/a", writable=True).write_at(b"!", 0)
        assert survivor.open("/d/b").read_at(9, 0)[:1] == b"!"


def test_a_directory_whose_name_was_not_synced_takes_everything_with_it(disk: SimulatedDisk) -> None:
    disk.make_directory("/d/sub")
    _synced(disk, "/d/sub/a", b"A")

    assert _outcomes(disk, POWER) == {(), ("/d/sub/a=A",)}

    disk.sync_directory("/d")
    assert _outcomes(disk, POWER) == {("/d/sub/a=A",)}


def test_make_directories_makes_names_that_last(disk: SimulatedDisk) -> None:
    make_directories(disk, "/d/x/y/z")
    _synced(disk, "/d/x/y/z/a", b"A")

    assert _outcomes(disk, POWER) == {("/d/x/y/z/a=A",)}


def test_make_directories_lasts_also_when_an_earlier_one_was_killed_halfway(disk: SimulatedDisk) -> None:
    """A directory that a killed process had made but not synced exists, and would be lost with all its records."""
    disk.make_directory("/d/x")
    after_kill = next(crash_states(disk.trace, damages=[CrashDamage.KILLED])).disk()

    make_directories(after_kill, "/d/x/y")
    _synced(after_kill, "/d/x/y/a", b"A")

    assert _outcomes(after_kill, POWER) == {("/d/x/y/a=A",)}


def test_a_sync_of_the_file_system_makes_everything_last(disk: SimulatedDisk) -> None:
    disk.make_directory("/d/sub")
    disk.create("/d/sub/a").write_at(b"A", 0)
    disk.rename("/d/sub/a", "/e/b")

    disk.sync_filesystem("/d")

    assert _outcomes(disk, POWER) == {("/e/b=A",)}


def test_files_are_damaged_together_and_each_alone(disk: SimulatedDisk) -> None:
    for path in ("/d/a", "/d/b"):
        _synced(disk, path, b"-").write_at(b"+", 1)

    old = {_describe(state) for state in crash_states(disk.trace, damages=[CrashDamage.OLD])}

    assert old == {("/d/a=-", "/d/b=-"), ("/d/a=-", "/d/b=-+"), ("/d/a=-+", "/d/b=-")}


def test_after_a_kill_every_finished_write_is_there_and_the_one_in_flight_in_part(disk: SimulatedDisk) -> None:
    file = disk.create("/d/a")
    file.write_at(b"first", 0)
    before = len(disk.trace)
    file.write_at(b"2nd", 5)

    killed = list(crash_states(disk.trace, at=before, damages=[CrashDamage.KILLED]))

    assert [state.files() for state in killed] == [
        {"/d/a": b"first"},
        {"/d/a": b"first2"},
        {"/d/a": b"first2n"},
    ]
    assert all(state.disk().identity("/d") == disk.identity("/d") for state in killed)


def test_after_a_kill_what_was_unsynced_is_unsynced_still(disk: SimulatedDisk) -> None:
    disk.create("/d/a").write_at(b"abc", 0)
    second_life = next(crash_states(disk.trace, damages=[CrashDamage.KILLED])).disk()
    assert second_life.open("/d/a").read_at(9, 0) == b"abc"
    assert {(), ("/d/a=",), ("/d/a=abc",)} <= _outcomes(second_life, POWER)

    second_life.open("/d/a").sync()
    second_life.sync_directory("/d")

    assert _outcomes(second_life, POWER) == {("/d/a=abc",)}


def test_after_a_power_cut_the_boot_is_another_and_what_is_left_is_durable(disk: SimulatedDisk) -> None:
    disk.create("/d/a").write_at(b"abc", 0)

    for state in crash_states(disk.trace, damages=POWER):
        second_life = state.disk()
        assert second_life.identity("/d") == "boot-2:1" != disk.identity("/d")
        assert _outcomes(second_life, POWER) == {_describe(state)}


def test_a_failed_sync_leaves_its_bytes_in_doubt_whatever_is_synced_later(disk: SimulatedDisk) -> None:
    """The system reports a failed write-back once and then takes the pages for clean."""
    file = _synced(disk, "/d/a", b"")
    file.write_at(b"ab", 0)
    disk.fail_when(lambda call: call.kind == "sync", errno.EIO)
    with pytest.raises(OSError):
        file.sync()

    file.write_at(b"cd", 2)
    file.sync()
    assert {b"abcd", b"\0\0cd"} <= _contents(disk, *POWER)
    assert all(content[2:] == b"cd" for content in _contents(disk, *POWER))

    file.write_at(b"AB", 0)
    file.sync()
    assert _contents(disk, *POWER) == {b"ABcd"}


def test_the_system_may_drop_what_it_failed_to_sync_and_readers_see_it(disk: SimulatedDisk) -> None:
    file = _synced(disk, "/d/a", b"synced")
    file.write_at(b"LOST", 0)
    file.write_at(b" failed", 6)
    disk.fail_when(lambda call: call.kind == "sync", errno.EIO)
    with pytest.raises(OSError):
        file.sync()
    file.write_at(b"still to be synced", 13)
    assert file.read_at(99, 0) == b"LOSTed failedstill to be synced"

    disk.discard_failed("/d/a")

    assert file.read_at(99, 0) == b"synced" + bytes(7) + b"still to be synced"
    file.sync()
    assert _contents(disk, *CrashDamage) == {b"synced" + bytes(7) + b"still to be synced"}


def test_notes_are_those_made_before_the_crash_and_go_on_into_the_next_life(disk: SimulatedDisk) -> None:
    disk.note("ack", 1)
    disk.create("/d/a")
    disk.note("ack", 2)

    for damages in (POWER, (CrashDamage.KILLED,)):
        state = next(crash_states(disk.trace, at=2, damages=damages))
        assert state.notes == (Note("ack", 1),)

        second_life = state.disk()
        second_life.note("ack", 3)
        after = next(crash_states(second_life.trace, damages=damages))
        assert after.notes == (Note("ack", 1), Note("crash", state.damage.value), Note("ack", 3))
        assert second_life.trace.prefixes()[-1] == len(second_life.trace)
        assert len(second_life.trace.prefixes()) == 2


def test_locks_are_free_in_the_next_life(disk: SimulatedDisk) -> None:
    assert disk.lock("/d/lock") is not None

    state = next(crash_states(disk.trace, damages=[CrashDamage.KILLED]))

    assert state.disk().lock("/d/lock") is not None


def test_the_disks_of_one_state_do_not_share_changes(disk: SimulatedDisk) -> None:
    _synced(disk, "/d/a", b"abc")
    state = next(crash_states(disk.trace))
    digest = state.digest()

    first = state.disk()
    first.open("/d/a", writable=True).write_at(b"X", 0)
    first.create("/d/b")

    assert state.disk().open("/d/a").read_at(9, 0) == b"abc"
    assert state.disk().list_directory("/d") == ["a"]
    assert state.digest() == digest


def test_one_seed_gives_the_same_states_and_a_bound_keeps_the_first(disk: SimulatedDisk) -> None:
    file = disk.create("/d/a")
    for number in range(12):
        file.write_at(bytes([number]) * 40, number * 40)
        disk.create(f"/d/{number}")

    def digests(states_max: int | None, seed: int) -> list[tuple[CrashDamage, bytes]]:
        states = crash_states(disk.trace, states_max=states_max, seed=seed)
        return [(state.damage, state.digest()) for state in states]

    bounded = digests(10, 1)
    assert bounded == digests(10, 1) != digests(10, 2)
    assert len(bounded) == len(set(bounded))
    for damage in POWER:
        first = [digest for kind, digest in bounded if kind is damage]
        assert first == [digest for kind, digest in digests(None, 1) if kind is damage][:10]


def test_exploring_all_prefixes_finds_what_each_alone_has(disk: SimulatedDisk) -> None:
    file = disk.create("/d/a")
    for number in range(4):
        file.write_at(b"%d" % number * 20, number * 20)
        file.sync()
        disk.note("ack", number)

    together = {(len(state.notes), state.digest()) for state in explore(disk.trace)}
    alone = {
        (len(state.notes), state.digest())
        for prefix in range(len(disk.trace) + 1)
        for state in crash_states(disk.trace, at=prefix)
    }

    assert together == alone
    assert sum(1 for _ in explore(disk.trace)) < sum(
        1 for prefix in range(len(disk.trace) + 1) for _ in crash_states(disk.trace, at=prefix)
    )


def test_replace_file_leaves_the_old_content_or_the_new_in_every_state(disk: SimulatedDisk) -> None:
    assert _mixtures(replace_file) == set()


@pytest.mark.parametrize("skipped", ["sync", "sync_directory", "tmp"])
def test_a_replacement_with_a_step_left_out_is_found_out(skipped: str) -> None:
    """The explorer would be worth nothing if it passed these."""

    def broken(disk: Disk, path: str, content: bytes) -> None:
        if skipped == "tmp":
            disk.unlink(path)
        name = path if skipped == "tmp" else f"{path}.tmp"
        file = disk.create(name)
        write_all(file, content, 0)
        if skipped != "sync":
            file.sync()
        if skipped != "tmp":
            disk.rename(name, path)
        if skipped != "sync_directory":
            disk.sync_directory("/d")

    assert _mixtures(broken) != set()


def _mixtures(replacing: Callable[[Disk, str, bytes], None]) -> set[bytes | None]:
    """What a replaced file held after some crash that is neither old nor, once replaced, the new."""
    disk = SimulatedDisk(directories=["/d"])
    replace_file(disk, "/d/a", b"the old content")
    begun = len(disk.trace)
    replacing(disk, "/d/a", b"the new content, longer")
    disk.note("replaced")

    wrong: set[bytes | None] = set()
    for state in explore(disk.trace, range(begun, len(disk.trace) + 1)):
        content = state.files().get("/d/a")
        allowed = [b"the new content, longer"] if state.notes else [b"the old content", b"the new content, longer"]
        if content not in allowed:
            wrong.add(content)
    return wrong


def _synced(disk: SimulatedDisk, path: str, content: bytes) -> SimulatedFile:
    file = disk.create(path)
    write_all(file, content, 0)
    file.sync()
    disk.sync_directory(path.rpartition("/")[0])
    return file


def _with(disk: SimulatedDisk, step: Callable[[SimulatedDisk], None]) -> SimulatedDisk:
    """The same disk one step on, in another life so that this one stays as it is."""
    other = next(crash_states(disk.trace, damages=[CrashDamage.KILLED])).disk()
    step(other)
    return other


def _contents(disk: SimulatedDisk, *damages: CrashDamage) -> set[bytes]:
    return {state.files()["/d/a"] for state in _all(disk, damages)}


def _outcomes(disk: SimulatedDisk, damages: tuple[CrashDamage, ...]) -> set[tuple[str, ...]]:
    return {_describe(state) for state in _all(disk, damages)}


def _all(disk: SimulatedDisk, damages: tuple[CrashDamage, ...]) -> Iterator[CrashState]:
    return crash_states(disk.trace, damages=damages, states_max=None)


def _describe(state: CrashState) -> tuple[str, ...]:
    return tuple(f"{path}={content.decode('latin-1')}" for path, content in sorted(state.files().items()))
