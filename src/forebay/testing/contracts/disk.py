"""What every `Disk` must do. Knows the Protocol and `release_idle`, which both of our disks offer.

Inherit `DiskContract` and give it two fixtures: `disk`, and `root`, an empty directory on it.
What survives a crash is no part of this suite: no test can ask the machine's disk for that.
"""

from __future__ import annotations

import errno
from typing import Protocol

import pytest

from forebay.disk import Disk, make_directories, replace_file, write_all


class ContractDisk(Disk, Protocol):
    """A `Disk` that gives its descriptors back on demand."""

    def release_idle(self) -> None: ...


class DiskContract:
    """The suite. A test's name is its claim."""

    def test_a_new_file_is_empty_and_keeps_what_is_written(self, disk: ContractDisk, root: str) -> None:
        file = disk.create(f"{root}/a")

        assert file.size() == 0
        assert file.read_at(10, 0) == b""
        assert file.write_at(b"hello", 0) == 5

        assert file.read_at(10, 0) == b"hello"
        assert file.read_at(3, 1) == b"ell"
        assert file.size() == 5
        assert file.path == f"{root}/a"

    def test_creating_a_name_that_is_taken_is_refused(self, disk: ContractDisk, root: str) -> None:
        disk.create(f"{root}/a").write_at(b"kept", 0)

        with pytest.raises(FileExistsError):
            disk.create(f"{root}/a")

        assert disk.open(f"{root}/a").read_at(9, 0) == b"kept"

    def test_opening_what_is_not_there_is_refused(self, disk: ContractDisk, root: str) -> None:
        for writable in (False, True):
            with pytest.raises(FileNotFoundError):
                disk.open(f"{root}/a", writable=writable)
            with pytest.raises(FileNotFoundError):
                disk.open(f"{root}/no/a", writable=writable)
        with pytest.raises(FileNotFoundError):
            disk.create(f"{root}/no/a")

    def test_a_directory_does_not_open_as_a_file(self, disk: ContractDisk, root: str) -> None:
        for writable in (False, True):
            with pytest.raises(IsADirectoryError):
                disk.open(root, writable=writable)

    def test_a_file_is_no_directory(self, disk: ContractDisk, root: str) -> None:
        disk.create(f"{root}/a")

        with pytest.raises(NotADirectoryError):
            disk.create(f"{root}/a/b")
        with pytest.raises(NotADirectoryError):
            disk.list_directory(f"{root}/a")
        assert not disk.exists(f"{root}/a/b")

    def test_bytes_like_things_can_be_written(self, disk: ContractDisk, root: str) -> None:
        file = disk.create(f"{root}/a")

        file.write_at(bytearray(b"ab"), 0)
        file.write_at(memoryview(b"xcdx")[1:3], 2)

        assert file.read_at(9, 0) == b"abcd"
        assert type(file.read_at(9, 0)) is bytes

    def test_writing_behind_the_end_leaves_zeros_between(self, disk: ContractDisk, root: str) -> None:
        file = disk.create(f"{root}/a")

        file.write_at(b"x", 4)

        assert file.read_at(9, 0) == b"\0\0\0\0x"

    def test_writing_inside_changes_only_those_bytes(self, disk: ContractDisk, root: str) -> None:
        file = disk.create(f"{root}/a")
        file.write_at(b"abcdef", 0)

        file.write_at(b"XY", 2)

        assert file.read_at(9, 0) == b"abXYef"

    def test_reading_behind_the_end_gives_nothing(self, disk: ContractDisk, root: str) -> None:
        file = disk.create(f"{root}/a")
        file.write_at(b"abc", 0)

        assert file.read_at(5, 2) == b"c"
        assert file.read_at(5, 3) == b""
        assert file.read_at(5, 300) == b""

    def test_truncating_cuts_or_extends_with_zeros(self, disk: ContractDisk, root: str) -> None:
        file = disk.create(f"{root}/a")
        file.write_at(b"abcdef", 0)

        file.truncate(2)
        file.truncate(4)

        assert file.read_at(9, 0) == b"ab\0\0"
        assert file.size() == 4

    def test_a_handle_for_reading_refuses_changes(self, disk: ContractDisk, root: str) -> None:
        disk.create(f"{root}/a").write_at(b"abc", 0)
        file = disk.open(f"{root}/a")

        with pytest.raises(OSError):
            file.write_at(b"x", 0)
        with pytest.raises(OSError):
            file.truncate(0)

        assert file.read_at(9, 0) == b"abc"

    def test_a_handle_for_reading_can_sync_what_others_wrote(self, disk: ContractDisk, root: str) -> None:
        disk.create(f"{root}/a").write_at(b"abc", 0)

        disk.open(f"{root}/a").sync()

    def test_two_handles_see_one_file(self, disk: ContractDisk, root: str) -> None:
        writer = disk.create(f"{root}/a")
        reader = disk.open(f"{root}/a")

        writer.write_at(b"abc", 0)
        writer.sync()

        assert reader.read_at(9, 0) == b"abc"
        assert reader.size() == 3

    def test_a_closed_handle_says_so_and_closes_twice(self, disk: ContractDisk, root: str) -> None:
        file = disk.create(f"{root}/a")
        file.close()
        file.close()

        for call in (
            lambda: file.read_at(1, 0),
            lambda: file.write_at(b"x", 0),
            lambda: file.truncate(0),
            file.size,
            file.sync,
        ):
            with pytest.raises(OSError) as raised:
                call()
            assert raised.value.errno == errno.EBADF

    def test_renaming_replaces_and_open_handles_keep_their_file(self, disk: ContractDisk, root: str) -> None:
        disk.create(f"{root}/old").write_at(b"old", 0)
        reader = disk.open(f"{root}/old")
        disk.create(f"{root}/new").write_at(b"new", 0)

        disk.rename(f"{root}/new", f"{root}/old")

        assert disk.list_directory(root) == ["old"]
        assert disk.open(f"{root}/old").read_at(9, 0) == b"new"
        assert reader.read_at(9, 0) == b"old"

    def test_renaming_goes_across_directories(self, disk: ContractDisk, root: str) -> None:
        disk.make_directory(f"{root}/aside")
        disk.create(f"{root}/a").write_at(b"abc", 0)

        disk.rename(f"{root}/a", f"{root}/aside/b")

        assert disk.list_directory(root) == ["aside"]
        assert disk.open(f"{root}/aside/b").read_at(9, 0) == b"abc"

    def test_a_directory_is_renamed_with_what_it_holds(self, disk: ContractDisk, root: str) -> None:
        disk.make_directory(f"{root}/d")
        disk.create(f"{root}/d/a").write_at(b"abc", 0)

        disk.rename(f"{root}/d", f"{root}/e")

        assert disk.open(f"{root}/e/a").read_at(9, 0) == b"abc"

    def test_wrong_renames_are_refused(self, disk: ContractDisk, root: str) -> None:
        disk.make_directory(f"{root}/d")
        disk.create(f"{root}/d/a")
        disk.make_directory(f"{root}/e")

        with pytest.raises(FileNotFoundError):
            disk.rename(f"{root}/none", f"{root}/x")
        with pytest.raises(IsADirectoryError):
            disk.rename(f"{root}/d/a", f"{root}/e")
        with pytest.raises(NotADirectoryError):
            disk.rename(f"{root}/e", f"{root}/d/a")
        with pytest.raises(OSError):
            disk.rename(f"{root}/e", f"{root}/d")
        with pytest.raises(OSError):
            disk.rename(f"{root}/d", f"{root}/d/inside")

    def test_renaming_one_name_of_a_file_to_another_of_it_changes_nothing(self, disk: ContractDisk, root: str) -> None:
        disk.create(f"{root}/a")
        disk.link(f"{root}/a", f"{root}/b")

        disk.rename(f"{root}/a", f"{root}/b")

        assert disk.list_directory(root) == ["a", "b"]

    def test_a_link_is_a_second_name_of_the_same_bytes(self, disk: ContractDisk, root: str) -> None:
        file = disk.create(f"{root}/a")
        disk.link(f"{root}/a", f"{root}/b")

        file.write_at(b"abc", 0)
        disk.unlink(f"{root}/a")

        assert disk.open(f"{root}/b").read_at(9, 0) == b"abc"

    def test_wrong_links_are_refused(self, disk: ContractDisk, root: str) -> None:
        disk.create(f"{root}/a")
        disk.create(f"{root}/b")
        disk.make_directory(f"{root}/d")

        with pytest.raises(FileExistsError):
            disk.link(f"{root}/a", f"{root}/b")
        with pytest.raises(FileNotFoundError):
            disk.link(f"{root}/none", f"{root}/x")
        with pytest.raises(PermissionError):
            disk.link(f"{root}/d", f"{root}/x")

    def test_an_unlinked_file_lives_on_for_its_handles(self, disk: ContractDisk, root: str) -> None:
        file = disk.create(f"{root}/a")
        file.write_at(b"abc", 0)

        disk.unlink(f"{root}/a")

        assert not disk.exists(f"{root}/a")
        assert file.read_at(9, 0) == b"abc"
        with pytest.raises(FileNotFoundError):
            disk.unlink(f"{root}/a")

    def test_directories_are_made_listed_and_removed(self, disk: ContractDisk, root: str) -> None:
        disk.make_directory(f"{root}/d")
        disk.make_directory(f"{root}/d")
        disk.create(f"{root}/d/b")
        disk.create(f"{root}/d/a")

        assert disk.list_directory(f"{root}/d") == ["a", "b"]
        with pytest.raises(OSError) as raised:
            disk.remove_directory(f"{root}/d")
        assert raised.value.errno == errno.ENOTEMPTY

        disk.unlink(f"{root}/d/a")
        disk.unlink(f"{root}/d/b")
        disk.remove_directory(f"{root}/d")
        assert not disk.exists(f"{root}/d")
        with pytest.raises(FileNotFoundError):
            disk.list_directory(f"{root}/d")

    def test_wrong_directories_are_refused(self, disk: ContractDisk, root: str) -> None:
        disk.create(f"{root}/a")

        with pytest.raises(FileExistsError):
            disk.make_directory(f"{root}/a")
        with pytest.raises(FileNotFoundError):
            disk.make_directory(f"{root}/no/d")
        with pytest.raises(NotADirectoryError):
            disk.remove_directory(f"{root}/a")
        with pytest.raises(OSError):
            disk.unlink(root)

    def test_syncs_of_directory_and_file_system_need_a_path_that_is_there(self, disk: ContractDisk, root: str) -> None:
        disk.create(f"{root}/a").write_at(b"abc", 0)

        disk.sync_directory(root)
        disk.sync_filesystem(root)

        with pytest.raises(FileNotFoundError):
            disk.sync_directory(f"{root}/no")
        with pytest.raises(FileNotFoundError):
            disk.sync_filesystem(f"{root}/no")

    def test_a_lock_is_held_once_until_released(self, disk: ContractDisk, root: str) -> None:
        lock = disk.lock(f"{root}/lock")
        assert lock is not None
        assert disk.exists(f"{root}/lock")

        assert disk.lock(f"{root}/lock") is None
        assert disk.lock(f"{root}/other") is not None

        lock.release()
        lock.release()
        again = disk.lock(f"{root}/lock")
        assert again is not None
        lock.release()
        assert disk.lock(f"{root}/lock") is None

    def test_asking_whether_a_lock_is_held_neither_takes_nor_makes_it(self, disk: ContractDisk, root: str) -> None:
        assert not disk.is_locked(f"{root}/lock")
        assert not disk.exists(f"{root}/lock")

        lock = disk.lock(f"{root}/lock")
        assert lock is not None
        assert disk.is_locked(f"{root}/lock")

        lock.release()
        assert not disk.is_locked(f"{root}/lock")
        assert disk.lock(f"{root}/lock") is not None

    def test_a_lock_file_that_was_replaced_is_another_lock(self, disk: ContractDisk, root: str) -> None:
        assert disk.lock(f"{root}/lock") is not None

        disk.unlink(f"{root}/lock")

        assert disk.lock(f"{root}/lock") is not None

    def test_the_time_of_the_last_change_is_known_and_stays_with_the_file(self, disk: ContractDisk, root: str) -> None:
        disk.create(f"{root}/a").write_at(b"abc", 0)

        changed = disk.modified_ms(f"{root}/a")
        disk.rename(f"{root}/a", f"{root}/b")

        assert disk.modified_ms(f"{root}/b") == changed >= 0
        with pytest.raises(FileNotFoundError):
            disk.modified_ms(f"{root}/a")

    def test_free_bytes_and_identity_are_known(self, disk: ContractDisk, root: str) -> None:
        assert disk.free_bytes(root) > 0
        assert disk.identity(root) == disk.identity(root) != ""
        with pytest.raises(FileNotFoundError):
            disk.identity(f"{root}/no")

    def test_a_clean_handle_goes_on_after_giving_its_descriptor_back(self, disk: ContractDisk, root: str) -> None:
        file = disk.create(f"{root}/a")
        file.write_at(b"abc", 0)
        file.sync()

        disk.release_idle()
        file.write_at(b"d", 3)
        file.sync()
        disk.release_idle()

        assert file.read_at(9, 0) == b"abcd"

    def test_a_dirty_handle_keeps_its_file_whatever_happens_to_the_name(self, disk: ContractDisk, root: str) -> None:
        file = disk.create(f"{root}/a")
        file.write_at(b"abc", 0)

        disk.release_idle()
        disk.rename(f"{root}/a", f"{root}/b")

        assert file.read_at(9, 0) == b"abc"
        file.sync()

    def test_a_handle_without_descriptor_refuses_another_file_under_its_name(
        self, disk: ContractDisk, root: str
    ) -> None:
        """A freed inode number may be given to the very next file, so the number alone proves nothing."""
        file = disk.create(f"{root}/a")
        file.write_at(b"old", 0)
        file.sync()

        disk.release_idle()
        disk.unlink(f"{root}/a")
        disk.create(f"{root}/a").write_at(b"new", 0)

        with pytest.raises(OSError) as raised:
            file.read_at(9, 0)
        assert raised.value.errno == errno.ESTALE

    def test_a_handle_without_descriptor_misses_a_name_that_is_gone(self, disk: ContractDisk, root: str) -> None:
        file = disk.create(f"{root}/a")

        disk.release_idle()
        disk.unlink(f"{root}/a")

        with pytest.raises(FileNotFoundError):
            file.size()

    def test_replace_file_makes_and_replaces(self, disk: ContractDisk, root: str) -> None:
        replace_file(disk, f"{root}/a", b"first")
        disk.create(f"{root}/a.tmp").write_at(b"leftover of a crash", 0)

        replace_file(disk, f"{root}/a", b"2nd")

        assert disk.open(f"{root}/a").read_at(99, 0) == b"2nd"
        assert disk.list_directory(root) == ["a"]

    def test_write_all_writes_all(self, disk: ContractDisk, root: str) -> None:
        file = disk.create(f"{root}/a")

        write_all(file, memoryview(bytes(range(256)) * 64), 3)
        write_all(file, b"", 0)

        assert file.read_at(1 << 20, 3) == bytes(range(256)) * 64

    def test_make_directories_makes_what_is_missing(self, disk: ContractDisk, root: str) -> None:
        make_directories(disk, f"{root}/x/y/z")
        make_directories(disk, f"{root}/x/y/z")

        assert disk.list_directory(f"{root}/x/y") == ["z"]
