"""`cover` against a model: whatever lies in memory, in files and in history, each offset has one tier that has it."""

from __future__ import annotations

import random  # noqa: TID251  # seeded: the same run again
from collections.abc import Callable
from itertools import pairwise
from typing import Final

import pytest

from forebay.appends.producer_window import ProducerWindow
from forebay.compacting.merging import SegmentTarget, merge
from forebay.compacting.planning import Rules
from forebay.compacting.shard import ShardCompaction
from forebay.format.metadata.descriptor import LoadStatus
from forebay.format.metadata.keys import compactor_key
from forebay.history import InHistory
from forebay.metadata import Absent, Put, RevisionIs
from forebay.pages import Span
from forebay.records import Gap
from forebay.shard import SegmentShard
from forebay.shard.tiers import Tier, Tiers
from forebay.testing.inside import inside
from forebay.wal.files import SealedFile
from forebay.wal.retention import drop_file
from tests.history.attached import LoadEnvironment, values
from tests.ledger import Ledger
from tests.support.environments.simulated import NAME, TOPIC_ID

STEPS: Final = 30


class Model:
    """A shard in every tier at once, and what must be found in it."""

    def __init__(self, mode: str, seed: int) -> None:
        self.chance = random.Random(seed)
        self.environment = LoadEnvironment(mode, partitions=2)
        self.node, self.other = self.environment.node("a"), self.environment.node("b")
        self.other.append(1)
        self.records: dict[int, bytes] = {}
        """Everything that was stored, by offset."""
        self.gone: set[int] = set()
        """What was deleted."""
        self.waiting = range(0)
        """The offsets of a load that is not committed."""
        self._loads = 0

    @property
    def shard(self) -> SegmentShard:
        return self.node.shard()

    @property
    def tiers(self) -> Tiers:
        return inside(self.shard).tiers

    @property
    def earliest(self) -> int:
        return self.shard.offsets().earliest

    # What happens

    def append(self) -> None:
        for offset in self.node.append(0, self.chance.randint(1, 6)):
            self.records[offset] = b"log 0/%d" % offset

    def rotate(self) -> None:
        self.shard.rotate()
        self.shard.upkeep.seal_rotated()

    def export(self) -> None:
        self.rotate()
        self.shard.history.catch_up()

    def drop(self) -> None:
        """Local copies of what the store has go."""
        if self.environment.settings.is_shared:
            for file in self.shard.wal.files.all[:-1][: self.chance.randint(0, 2)]:
                if isinstance(file, SealedFile) and file.end <= self.shard.history.exported:
                    drop_file(self.environment.disk, self.shard.wal.files, file)
        self.shard.history.retain()

    def load(self) -> None:
        """A load comes in; it waits if another partition does not have it yet."""
        if self.waiting:
            return
        self._loads += 1
        name, brought = f"0000000{self._loads}", values(0, self.chance.randint(1, 9))
        waits = self.chance.random() < 0.5
        self.node.offer({0: brought, **({1: [b"other"]} if waits else {})}, name, per_segment=4)
        self.node.loads.attach(name)
        start = self.shard.offsets().next - len(brought)
        self.records.update(enumerate(brought, start))
        if waits:
            self.waiting = range(start, start + len(brought))

    def end_load(self) -> None:
        if self.waiting:
            if self.other.settle(f"0000000{self._loads}").status is not LoadStatus.COMMITTED:
                # In mode local the other directory cannot read it: it is given up, and leaves a gap.
                for offset in self.waiting:
                    del self.records[offset]
            self.waiting = range(0)

    def delete(self) -> None:
        start = self.chance.randint(0, self.shard.wal.head)
        stop = start + self.chance.randint(1, 4)
        found = self.shard.deletes.delete_range(start, stop)
        ended = [o for o in range(max(start, self.earliest), stop) if o in self.records and o not in self.gone]
        ended = [offset for offset in ended if offset not in self.waiting]
        assert found == len(ended)
        self.gone.update(ended)

    def move_floor(self) -> None:
        stop = self.waiting.start if self.waiting else self.shard.wal.head
        self.shard.deletes.delete_before(self.chance.randint(0, stop) // 2)

    def compact(self) -> None:
        """Segments of history become few Parquet ones, without what was deleted."""
        environment, places = self.environment, self.node.places
        catalog, metadata = environment.catalog(0), self.node.metadata
        lease = compactor_key(NAME.namespace, NAME.topic, 0, prefix="/forebay")
        session = metadata.session(5)
        taken = metadata.transaction([Absent(lease)], [Put(lease, b"compactor", session.id)])
        compaction = ShardCompaction(
            catalog, TOPIC_ID, places, readable=lambda _: True, manifest=lambda piece: list(places.manifest(piece))
        )
        shared = environment.settings.is_shared
        store, name = (places.store, places.store_name) if shared else (places.loads.open(), places.loads_name)
        assert store is not None
        outlook = compaction.outlook(Rules(settle_ms=0, segments_min=2), environment.clock.now_ms())
        target = SegmentTarget(store, name, "compaction", environment.clock.now_ms())
        for rewrite in outlook.rewrites:
            made = [
                merge(
                    task,
                    outlook.ended,
                    places,
                    target,
                    token=environment.clock.random_bytes(8).hex(),
                    window=ProducerWindow(10, 10),
                )
                for task in compaction.merges(rewrite, outlook)
            ]
            compaction.finish(rewrite, made, target, RevisionIs(lease, taken.revision))
        session.close()

    def reopen(self) -> None:
        self.node.close()
        self.node = self.environment.node("a")

    # What must hold

    def check(self) -> None:
        """`cover` names a tier for every offset, and a reader that follows it finds every record."""
        shard, head = self.shard, self.shard.wal.head
        start, stop = sorted((self.chance.randint(0, head), self.chance.randint(0, head + 3)))
        before, part, spans = (self.tiers.cover(*ends) for ends in ((0, head), (start, stop), (0, head)))
        # Compaction may be met in between.
        wanted = [_clipped(_ranges(whole), start, min(stop, head)) for whole in (before, spans)]
        assert _ranges(part) in wanted
        assert [spans[0].start if spans else 0, spans[-1].stop if spans else head] == [0, head]
        assert all(one.stop == other.start for one, other in pairwise(spans))
        for low, high, tier in spans:
            waits = isinstance(tier, InHistory) and tier.waits
            assert waits == (low in self.waiting), (low, high, tier)
            assert not isinstance(tier, Gap) or high <= self.earliest or not self._stored(low, high), (low, high, tier)
        live = {offset for offset in self.records if offset >= self.earliest and offset not in self.gone}
        assert set(shard.deletes.live(0, head)) == live - set(self.waiting)
        assert self.read() == {offset: value for offset, value in self.records.items() if offset in live}

    def read(self) -> dict[int, bytes | None]:
        """What a reader finds, who steps over a load that waits."""
        found: dict[int, bytes | None] = {o: self.records[o] for o in self.waiting if o >= self.earliest}
        at = 0
        while at < self.shard.wal.head:
            page = self.shard.read(at, self.chance.choice((1, 100, 1 << 20)))
            if page.next == at:
                assert at == self.waiting.start
                at = self.waiting.stop
                continue
            for batch in page.batches:
                found.update(enumerate(batch.values(), batch.base))
            at = page.next
        return found

    def _stored(self, start: int, stop: int) -> bool:
        return any(offset in self.records and offset not in self.gone for offset in range(start, stop))


def _ranges(spans: list[Span[Tier]]) -> list[tuple[int, int]]:
    return [(span.start, span.stop) for span in spans]


def _clipped(ranges: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    cut = [(max(low, start), min(high, stop)) for low, high in ranges]
    return [(low, high) for low, high in cut if low < high]


ACTS: Final[dict[str, Callable[[Model], None]]] = {
    "append": Model.append,
    "rotate": Model.rotate,
    "export": Model.export,
    "drop": Model.drop,
    "load": Model.load,
    "end load": Model.end_load,
    "delete": Model.delete,
    "floor": Model.move_floor,
    "compact": Model.compact,
    "reopen": Model.reopen,
}
_WEIGHTS: Final = [8, 3, 3, 3, 2, 2, 2, 1, 1, 1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", ["shared_fs", "local"])
def test_each_offset_is_in_one_tier_and_every_reader_finds_it(mode: str, seed: int, ledger: Ledger) -> None:
    model = Model(mode, seed)
    for _ in range(STEPS):
        act = model.chance.choices(list(ACTS), _WEIGHTS)[0]
        ACTS[act](model)
        model.check()
        ledger.count("covers", act=act)


@pytest.mark.parametrize("act", ["export", "drop", "compact"])
@pytest.mark.parametrize("mode", ["shared_fs", "local"])
def test_what_moves_to_another_tier_between_the_answer_and_the_look_is_found(
    mode: str, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(mode, 1)
    for _ in range(4):
        model.append()
        model.export()
    model.append()
    model.rotate()
    model.append()
    if act == "drop":
        model.compact()
    cover, acted = Tiers.cover, list[bool]()

    def moved(tiers: Tiers, start: int, stop: int) -> list[Span[Tier]]:
        found = cover(tiers, start, stop)
        if not acted:
            acted.append(True)
            ACTS[act](model)
            for file in model.shard.wal.files.all:
                file.close()  # the next look opens it, or misses it
        return found

    monkeypatch.setattr(Tiers, "cover", moved)

    assert set(model.shard.deletes.live(0, model.shard.wal.head)) == set(model.records)
    assert acted
    acted.clear()
    monkeypatch.setattr(Tiers, "cover", cover)
    model.check()
