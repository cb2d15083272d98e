"""Damaged bytes in the file that tells of deletes and floors: one bad place never brings a record back."""

from __future__ import annotations

from typing import Final

import pytest

from forebay.errors import ForebayError
from forebay.format.control import Floor
from forebay.records import Reason
from forebay.testing.disk import ROOMY, SimulatedDisk
from forebay.testing.trace import Image, Trace
from forebay.topics import Durability
from tests.ledger import Ledger
from tests.log.removals import delete, move_floor
from tests.log.rig import DIRECTORY, Rig, simulated

FLIPS: Final = (0x01, 0xFF)
DELETED: Final = {1, 3, 4, 7}
FLOOR: Final = Floor(1, 1, Reason.CAP)


def _image(*, restated: bool, closed: bool) -> tuple[Image, int]:
    """A shard in which records ended, and the file that says so."""
    rig = Rig(simulated(), Durability.FSYNC).open()
    rig.append(5)
    delete(rig, 1, 3)
    move_floor(rig, 1, 1)
    if restated:
        rig.wal.rotate()
    rig.append(3)
    delete(rig, 4)
    rig.append()
    delete(rig, 7)
    if closed:
        rig.shard.upkeep.close()
    volume = rig.disk.volume
    newest = max(name for name in rig.disk.list_directory(DIRECTORY) if name.endswith(".seg"))
    return volume.image(), volume.find(f"{DIRECTORY}/{newest}")


@pytest.mark.slow
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("restated", [False, True])
def test_one_damaged_place_brings_back_no_deleted_record(*, restated: bool, closed: bool, ledger: Ledger) -> None:
    """I23, I24: every record is there or named as damaged, and what ended has ended."""
    image, inode = _image(restated=restated, closed=closed)
    content = image.files[inode]
    broken: list[str] = []
    for place in range(len(content)):
        for flip in FLIPS:
            damaged = content[:place] + bytes([content[place] ^ flip]) + content[place + 1 :]
            changed = Image(files={**image.files, inode: damaged}, directories=image.directories)
            disk = SimulatedDisk.restored(changed, Trace(start=changed), free=ROOMY, next_inode=1_000)
            try:
                found = Rig(disk, Durability.FSYNC, epoch=5).open().wal.writer.removals
            except ForebayError:
                ledger.count("damaged bytes where deletes stand", outcome="named error")
                continue
            ledger.count("damaged bytes where deletes stand", outcome="intact")
            if (set(found.deletes), found.floor) != (DELETED, FLOOR):
                broken.append(f"flip {flip:02x} at byte {place} of {len(content)}: {set(found.deletes)}, {found.floor}")
    assert broken[:10] == []
