"""What a seal or an export promises where files end in gaps, or cannot be sealed."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

import pytest

from forebay import DataLoss, Unavailable
from forebay.records import Gap, Reason
from forebay.settings import Settings
from forebay.storage import Storage
from tests.storage.rig import QUICK, WatchedDisk, no_indexes, values

RESERVED: Final = 65


def _settings(tmp_path: Path) -> Settings:
    return Settings.load(
        overrides={
            **QUICK,
            "wal": {**QUICK["wal"], "reserve_records_min": RESERVED - 1},
            "storage": {"mode": "shared_fs"},
            "store": {"root": f"{tmp_path}/store"},
        }
    )


def test_a_log_that_ends_in_a_gap_behind_its_last_file_is_sealed(tmp_path: Path) -> None:
    """Found by review: the gap was named by a file without records, which is never exported."""
    disk, gaps = WatchedDisk(), []
    settings = _settings(tmp_path)
    with pytest.raises(DataLoss, match=r"\[1, 3\)"), Storage.open(tmp_path / "log", settings, disk=disk) as log:
        topic = log.create_topic("orders", durability="memory")
        topic.append(b"0")
        topic.flush()

        def no_writes(kind: str, path: str) -> None:
            if kind == "write" and path.endswith(".seg"):
                raise OSError(errno.EIO, "no writes")

        disk.meet = no_writes
        topic.append_many([b"1", b"2"])
    disk.meet = lambda kind, path: None
    with Storage.open(tmp_path / "log", settings, disk=disk) as log:
        topic = log.topic("orders")
        assert topic.offsets().next == RESERVED

        (state,) = log.seal_topic("orders")

        assert state.next_offset == RESERVED
        log.unseal_topic("orders")
        assert topic.append(b"next") == RESERVED
        assert values(topic.read(0, on_gap=lambda _, gap: gaps.append(gap))) == [b"0", b"next"]
        assert gaps == [Gap(1, RESERVED, Reason.LOST)]


def test_an_export_says_so_if_a_file_could_not_be_sealed(tmp_path: Path) -> None:
    disk = WatchedDisk()
    with Storage.open(tmp_path / "log", _settings(tmp_path), disk=disk) as log:
        topic = log.create_topic("orders")
        topic.append(b"0")

        disk.meet = no_indexes
        with pytest.raises(Unavailable, match="could not be sealed yet"):
            log.export_topic("orders")
        disk.meet = lambda kind, path: None
        log.export_topic("orders")

        assert topic.offsets().exported == 1
