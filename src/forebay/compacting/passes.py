"""Passes over one shard, by the holder of its lease: look, have new segments written, swap them in, until all is done.

The caller decides who writes them: this process, or executors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec

from forebay.compacting.merging import Merge, SegmentTarget
from forebay.compacting.planning import Rewrite
from forebay.compacting.shard import CompactionOutlook, ShardCompaction
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.format.metadata.vectors import DeletionVector, vectors_of
from forebay.metadata import Compare

PASSES_MAX: Final = 8
"""What became small by losing records may be worth putting together again: but not for ever."""


class Unit(msgspec.Struct, frozen=True, array_like=True):
    """One segment to be written."""

    task: Merge
    ended: tuple[DeletionVector, ...]
    store: str
    created_at: int
    window: tuple[int, int]
    """How many producers owners remember, and how many appends of each: the writer may have other settings."""


Write: TypeAlias = Callable[[Sequence[Unit]], Iterator[SegmentDescriptor | str]]
"""Writes every unit: the descriptor of each, in their order, or why there is none."""


class ShardLease(NamedTuple):
    """The lease of the shard."""

    held: Compare
    """Holds in a transaction if the lease is still this one."""
    check: Callable[[], None]
    """Raises if it was lost."""


class Failure(NamedTuple):
    """Offsets that could not be rewritten, and why."""

    start: int
    end: int
    why: str


class Passes:
    """Compacts one shard for as long as there is something to do. For one thread."""

    def __init__(
        self,
        compaction: ShardCompaction,
        target: Callable[[], SegmentTarget],
        write: Write,
        look: Callable[[], CompactionOutlook],
        window: tuple[int, int],
    ) -> None:
        """`window` says how many producers, and appends of each, must be recognised as repeats."""
        self._compaction = compaction
        self._target = target
        self._write = write
        self._look = look
        self._window = window
        self.failures: list[Failure] = []
        self.swapped = 0

    def run(self, holding: ShardLease) -> None:
        """On return nothing more is to be done, but for what `failures` names and what came meanwhile."""
        for _ in range(PASSES_MAX):
            # Under the lease: no other process rewrites from here on, though history may grow, and records end.
            outlook = self._look()
            failed = {(failure.start, failure.end) for failure in self.failures}
            wanted = [rewrite for rewrite in outlook.rewrites if (rewrite.start, rewrite.end) not in failed]
            if not wanted:
                return
            self._pass(holding, outlook, wanted)

    def _pass(self, holding: ShardLease, outlook: CompactionOutlook, wanted: Sequence[Rewrite]) -> None:
        target = self._target()
        units = [self._units(rewrite, outlook, target) for rewrite in wanted]
        written = self._write([unit for group in units for unit in group])
        for rewrite, group in zip(wanted, units, strict=True):
            results = [next(written) for _ in group]
            made = [result for result in results if not isinstance(result, str)]
            if len(made) < len(group):
                why = next(result for result in results if isinstance(result, str))
                self.failures.append(Failure(rewrite.start, rewrite.end, why))
                continue
            holding.check()
            self.swapped += self._compaction.finish(rewrite, made, self._target(), holding.held)

    def _units(self, rewrite: Rewrite, outlook: CompactionOutlook, target: SegmentTarget) -> list[Unit]:
        return [
            Unit(
                task,
                tuple(vectors_of(outlook.ended.clipped(task.start, task.end), 1)),
                target.name,
                target.created_at,
                self._window,
            )
            for task in self._compaction.merges(rewrite, outlook)
        ]
