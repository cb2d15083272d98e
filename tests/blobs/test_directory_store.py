"""A store in a directory: what crashes and failing disks leave of it, and on which mounts it works at all."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.blobs import BlobChanged, BlobMissing, BlobStore, Denied, DirectoryStore, open_store
from forebay.disk import SystemDisk
from forebay.errors import ForebayError, Indeterminate, Invalid, Unavailable, Unsupported
from forebay.settings import StoreSettings
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.crashes import CrashState, explore
from forebay.testing.simulated.damage import CrashDamage
from forebay.testing.simulated.disk import SimulatedDisk
from forebay.testing.simulated.faults import plan_faults
from forebay.testing.simulated.trace import Note
from tests.ledger import Ledger

SMALL = b"an index"
LARGE = [bytes([number]) * 700 for number in range(8)]
UPLOADS = "/blobs/.uploads"


def opened(disk: SimulatedDisk, *, seed: int = 0) -> DirectoryStore:
    return DirectoryStore("/blobs", disk=disk, clock=ManualClock(seed=seed)).open()


def scenario(disk: SimulatedDisk) -> None:
    store = opened(disk)
    store.put_if_absent("t_0/1.idx", SMALL)
    disk.note("stored", ("t_0/1.idx", SMALL))
    store.upload("t_0/1.seg", LARGE)
    disk.note("stored", ("t_0/1.seg", b"".join(LARGE)))
    store.put_if_absent("loads/x/m", SMALL * 2)
    disk.note("stored", ("loads/x/m", SMALL * 2))


def expected(state: CrashState) -> dict[str, bytes]:
    stored: dict[str, bytes] = {}
    for note in state.notes:
        assert isinstance(note.payload, tuple)
        stored[note.payload[0]] = note.payload[1]
    return stored


WHOLE = {"t_0/1.idx": SMALL, "t_0/1.seg": b"".join(LARGE), "loads/x/m": SMALL * 2}


def test_after_any_crash_what_was_stored_is_there_and_nothing_is_half_there(ledger: Ledger) -> None:
    disk = SimulatedDisk()
    scenario(disk)

    for state in explore(disk.trace, states_max=8):
        ledger.count("crash states", scenario="directory store", damage=state.damage.value)
        store = opened(state.disk(), seed=1)
        found = {stat.key: store.get_range(stat.key, 0, stat.size) for stat in store.list()}
        assert expected(state).items() <= found.items(), state
        assert found.items() <= WHOLE.items(), state


def test_a_folder_left_by_a_killed_process_is_made_to_last_before_anything_in_it_is(ledger: Ledger) -> None:
    first = SimulatedDisk()
    opened(first).put_if_absent("a/b/one", SMALL)

    for killed in explore(first.trace, damages=(CrashDamage.KILLED,)):
        disk = killed.disk()
        opened(disk, seed=1).put_if_absent("a/b/two", SMALL * 3)
        for state in explore(disk.trace, [len(disk.trace)], damages=(CrashDamage.OLD,)):
            ledger.count("crash states", scenario="directory store, second life", damage=state.damage.value)
            assert opened(state.disk(), seed=2).get_range("a/b/two", 0, 99) == SMALL * 3, (killed, state)


def test_whatever_call_fails_the_error_is_named_and_the_store_true() -> None:
    healthy = SimulatedDisk()
    scenario(healthy)
    faults = list(plan_faults(healthy.calls))
    assert len(faults) > 100

    for fault in faults:
        disk = SimulatedDisk()
        disk.plan(fault)
        with contextlib.suppress(ForebayError):
            scenario(disk)
        disk.heal()
        store = opened(disk, seed=1)
        found = {stat.key: store.get_range(stat.key, 0, stat.size) for stat in store.list()}
        acknowledged = {note.payload for note in disk.trace.operations if isinstance(note, Note)}
        assert acknowledged <= found.items() <= WHOLE.items(), fault
        scenario(disk)
        assert {stat.key for stat in store.list()} == WHOLE.keys(), fault


def test_a_failed_link_or_directory_sync_leaves_the_outcome_open() -> None:
    for kind, path in (("link", "/blobs/k"), ("sync_directory", "/blobs")):
        disk = SimulatedDisk()
        store = opened(disk)
        disk.fail_when(lambda call, kind=kind, path=path: (call.kind, call.path) == (kind, path), errno.EIO)  # type: ignore[misc]

        with pytest.raises(Indeterminate, match="k may or may not be stored"):
            store.put_if_absent("k", b"1")


def test_a_full_disk_is_unavailable_and_leaves_no_temporary_file() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    disk.free = 1000

    with pytest.raises(Unavailable, match="cannot store k"):
        store.upload("k", [bytes(700), bytes(700)])

    assert disk.list_directory(UPLOADS) == []
    assert store.stat("k") is None


def test_leftovers_of_killed_uploads_are_cleared_once_they_are_old() -> None:
    disk = SimulatedDisk()
    clock = ManualClock()
    store = DirectoryStore("/blobs", disk=disk, clock=clock).open()
    store.upload("kept", [b"1"])
    disk.create(f"{UPLOADS}/old.tmp")
    clock.advance(100)
    disk.now_ms = clock.now_ms()
    disk.create(f"{UPLOADS}/young.tmp")
    clock.advance(50)

    assert store.abort_stale_uploads(120) == 1

    assert disk.list_directory(UPLOADS) == ["young.tmp"]
    assert store.stat("kept") is not None


def test_a_folder_removed_by_hand_is_made_again() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    store.put_if_absent("a/k", b"1")
    disk.unlink("/blobs/a/k")
    disk.remove_directory("/blobs/a")

    with pytest.raises(Unavailable, match="the folder of a/k was removed meanwhile"):
        store.put_if_absent("a/k", b"1")

    assert store.put_if_absent("a/k", b"1")


@pytest.mark.parametrize(
    ("kind", "number", "message"),
    [
        ("link", errno.EPERM, "makes no hard links"),
        ("link", errno.EOPNOTSUPP, "makes no hard links"),
        ("sync_directory", errno.EINVAL, "cannot sync a directory"),
    ],
)
def test_a_mount_without_what_safety_needs_is_refused_by_name(kind: str, number: int, message: str) -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    disk.fail_when(lambda call: call.kind == kind, number, times=None)

    with pytest.raises(Unsupported, match=f"directory /blobs: this file system {message}"):
        store.probe()

    assert disk.list_directory(UPLOADS) == []


@pytest.mark.parametrize("root", ["file", "file/below"])
def test_a_root_that_cannot_be_a_directory_is_refused(root: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")

    with pytest.raises(Invalid, match="a file is in its place or above it: name another directory"):
        open_store(StoreSettings(root=str(tmp_path / root)), disk=SystemDisk())


def test_a_mount_that_was_away_is_made_ready_by_a_probe_and_by_no_write() -> None:
    disk = SimulatedDisk()
    store = DirectoryStore("/blobs", disk=disk, clock=ManualClock())
    disk.fail_when(lambda call: call.path.startswith("/blobs"), errno.EIO)
    with pytest.raises(Unavailable, match="cannot make the directory"):
        store.probe()

    assert store.abort_stale_uploads(0) == 0
    with pytest.raises(Unavailable, match="directory /blobs is no store: mount it, or correct the settings"):
        store.put_if_absent("a/k", b"1")
    assert not disk.exists("/blobs")
    assert store.probe().exclusive_create
    assert store.put_if_absent("a/k", b"1")


def test_a_stale_mount_is_unavailable_and_a_file_replaced_under_its_reader_is_changed() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    store.put_if_absent("a/k", b"1")
    calls: list[Callable[[], object]] = [
        store.probe,
        lambda: store.put_if_absent("a/other", b"1"),
        lambda: store.get_range("a/k", 0, 1),
        lambda: store.stat("a/k"),
        lambda: list(store.list()),
        lambda: store.delete("a/k"),
        lambda: store.abort_stale_uploads(0),
    ]
    disk.fail_when(lambda call: call.kind != "read", errno.ESTALE, times=None)
    for call in calls:
        with pytest.raises(Unavailable, match="directory /blobs"):
            call()

    disk.heal()
    disk.fail_when(lambda call: call.kind == "read", errno.ESTALE)
    with pytest.raises(BlobChanged, match="cannot read a/k: the file was replaced meanwhile"):
        store.get_range("a/k", 0, 1)


def test_a_mount_without_locks_is_reported_but_taken() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    disk.fail_when(lambda call: call.kind == "lock", errno.ENOLCK)

    assert "no file locks here" in store.probe().notes[0]
    assert store.probe().notes == ()


def test_a_mount_that_links_over_a_taken_name_is_refused() -> None:
    class Careless(SimulatedDisk):
        def link(self, source: str, target: str) -> None:
            if self.exists(target):
                self.unlink(target)
            super().link(source, target)

    with pytest.raises(Unsupported, match="a second writer was let to create the same name"):
        opened(Careless()).probe()


def _read(store: BlobStore) -> object:
    return store.get_range("a/k", 0, 1)


@pytest.mark.parametrize("call", [_read, lambda store: store.stat("a/k"), lambda store: list(store.list())])
def test_what_may_not_be_read_is_denied_and_not_missing(call: Callable[[BlobStore], object]) -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    store.put_if_absent("a/k", b"1")
    disk.fail_when(lambda call: call.path.startswith("/blobs/a"), errno.EACCES)

    with pytest.raises(Denied, match="look at the rights of the directory"):
        call(store)


def test_the_store_shares_its_directory_with_other_files(tmp_path: Path) -> None:
    (tmp_path / ".snapshot").mkdir()
    (tmp_path / ".snapshot" / "x").write_bytes(b"1")
    store = open_store(StoreSettings(root=str(tmp_path)), disk=SystemDisk())

    assert list(store.list()) == []
    with pytest.raises(BlobMissing):
        store.get_range("snapshot/x", 0, 1)


def test_files_of_others_among_the_objects_are_left_out_of_a_list() -> None:
    """NFS keeps a file that is deleted while it is read as `.nfs…` beside it: no sweep may stumble over that."""
    disk = SimulatedDisk()
    store = opened(disk)
    store.put_if_absent("t_0/k", b"1")
    disk.make_directory("/blobs/lost+found")
    for path in ("/blobs/read me", "/blobs/lost+found/x", "/blobs/t_0/.nfs0001", "/blobs/t_0/k~"):
        disk.create(path)
    disk.fail_when(lambda call: call.path.startswith("/blobs/lost+found"), errno.EACCES)

    assert [stat.key for stat in store.list()] == ["t_0/k"]
    assert [stat.key for stat in store.list("t_0")] == ["t_0/k"]


def test_what_is_deleted_while_it_is_looked_at_is_not_there() -> None:
    class Late(SimulatedDisk):
        def modified_ms(self, path: str) -> int:
            if path == "/blobs/a/gone":
                self.unlink(path)
            return super().modified_ms(path)

    disk = Late()
    store = opened(disk)
    store.put_if_absent("a/kept", b"1")
    disk.create("/blobs/a/gone")
    assert store.stat("a/gone") is None

    disk.create("/blobs/a/gone")
    assert [stat.key for stat in store.list()] == ["a/kept"]


def test_a_directory_must_be_named() -> None:
    with pytest.raises(Invalid, match='store.backend is "directory" without store.root'):
        open_store(StoreSettings(), disk=SystemDisk())
