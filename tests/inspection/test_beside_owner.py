"""An owner that writes, rotates and seals between any two steps of a verification is not taken for damage."""

from __future__ import annotations

import pytest

from forebay.format.metadata.descriptor import ShardState
from forebay.inspection.directory import ExpectedShard
from forebay.inspection.verify import shard as shard_room
from forebay.inspection.verify.shard import verify_shard
from forebay.topics import Durability
from tests.wal.rig import DIRECTORY, ROOT, TOPIC_ID, Rig, Simulated, simulated, spec_of


class BusyDisk:
    """Another process's view of the owner's disk: before each thing it asks for, the owner does something."""

    def __init__(self, owner: Simulated, *, every: int) -> None:
        self._owner = owner
        self._every = every
        self._asked = 0

    def __getattr__(self, name: str) -> object:
        self._asked += 1
        if self._asked % self._every == 0:
            _work(self._owner, self._asked // self._every)
        return getattr(self._owner.disk, name)


def _work(owner: Simulated, turn: int) -> None:
    owner.append(2, size=100)
    if turn % 2:
        owner.wal.rotate()
    if turn % 3 == 0:
        owner.shard.upkeep.seal_rotated()


@pytest.mark.parametrize("every", range(1, 12))
@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.DISK])
def test_one_look_beside_a_busy_owner_finds_nothing_wrong(
    monkeypatch: pytest.MonkeyPatch, durability: Durability, every: int
) -> None:
    """Found under load: the checkpoint was read last and named files sealed after the directory was listed."""
    monkeypatch.setattr(shard_room, "LOOKS", 1)
    owner = Rig(simulated(), durability, seed=f"busy {every}").open()
    for turn in range(1, 8):
        _work(owner, turn)
    place = ExpectedShard(f"{TOPIC_ID}_0", "shop/orders[0]", DIRECTORY, spec_of(durability), 0)
    state = ShardState(incarnation=TOPIC_ID, epoch=owner.epoch, holder=ROOT, holder_since=1)

    report = verify_shard(BusyDisk(owner, every=every), place, state, owned=True)  # type: ignore[arg-type]

    assert [str(finding) for finding in report.findings] == []
    assert report.records > 0
