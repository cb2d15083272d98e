"""Reading ahead: an object in blocks, fetched before the reader asks for them. Knows ranges, no stores.

Memory stays bounded: a few blocks for each of the latest readers, never more than one budget for all of them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor

from forebay.blobs.ahead import answer_of, asked_of
from forebay.blobs.ranges import Range
from forebay.locks import Rank, RankedLock
from forebay.records import Bytes

RUNS_MAX = 3
BUDGET_BYTES = 64 * 1024 * 1024
"""What all readers of one store hold in blocks, whatever their number."""


class _Run:
    """One reader's way through a segment: adjoining blocks, fetched or under way, from where it stands."""

    def __init__(self, start: int) -> None:
        self.blocks: deque[tuple[int, Future[bytes]]] = deque()
        self.stop = start
        """Where the last block ends."""

    def covers(self, position: int) -> bool:
        """Whether a read there is in these blocks, or goes on right behind them."""
        return self.blocks[0][0] <= position <= self.stop

    @property
    def bytes(self) -> int:
        """What its blocks hold or will hold."""
        return self.stop - self.blocks[0][0] if self.blocks else 0

    def ahead_of(self, position: int) -> int:
        """How many blocks begin there or later."""
        return sum(start >= position for start, _ in self.blocks)

    def forget_before(self, position: int) -> None:
        """Drop the blocks that end there or earlier."""
        while len(self.blocks) > 1 and self.blocks[1][0] <= position:
            self.blocks.popleft()


class Budget:
    """How much all readers together hold: beyond it, the one that stood still longest drops blocks. Thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = RankedLock(Rank.STORE, "blobs.budget")
        self._held: OrderedDict[_Run, tuple[ReadAhead, int]] = OrderedDict()
        self._total = 0

    def used(self, reader: ReadAhead, run: _Run) -> None:
        """The run was read from. The caller holds no lock."""
        stale: list[tuple[ReadAhead, _Run]] = []
        with self._lock:
            self._total += run.bytes - self._held.pop(run, (reader, 0))[1]
            self._held[run] = (reader, run.bytes)
            while self._total > self._bytes_max and len(self._held) > 1:
                oldest, (holder, size) = self._held.popitem(last=False)
                self._total -= size
                stale.append((holder, oldest))
        for holder, oldest in stale:
            holder.forget(oldest)

    def given_back(self, run: _Run) -> None:
        """The run holds nothing any more."""
        with self._lock:
            self._total -= self._held.pop(run, (None, 0))[1]


class ReadAhead:
    """A byte source over ranged reads. Safe for concurrent use.

    A read somewhere fetches what it asks for and no more, so that its answer comes soon. Reads that go on from
    there find the next blocks fetched before they are needed. Holds `blocks_ahead + 2` blocks for each of the last
    `RUNS_MAX` readers at the most, and none of a reader that came to the end.
    """

    def __init__(
        self,
        fetch: Range,
        size: int,
        *,
        pool: ThreadPoolExecutor,
        block_bytes: int,
        blocks_ahead: int,
        budget: Budget | None = None,
    ) -> None:
        self._budget = budget or Budget(BUDGET_BYTES)
        self._fetch = fetch
        self._size = size
        self._pool = pool
        self._block_bytes = block_bytes
        self._blocks_ahead = blocks_ahead
        self._lock = RankedLock(Rank.LEAF, "blobs.blocks")
        self._runs: list[_Run] = []
        """The one used last stands last."""

    def read_at(self, length: int, position: int) -> Bytes:
        """See `ByteSource`. What lies in one block is not copied."""
        stop = min(position + length, self._size)
        if position >= stop:
            return b""
        with self._lock:
            run, left = self._run_at(position, stop)
            wanted = [(start, block) for start, block in run.blocks if start < stop]
        self._budget.used(self, run)
        for gone in left:
            self._budget.given_back(gone)
        try:
            parts = [memoryview(answer_of(block))[max(0, position - start) : stop - start] for start, block in wanted]
        except BaseException:
            self.forget(run)
            raise
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Forget all blocks."""
        for run in list(self._runs):
            self.forget(run)

    def forget(self, run: _Run) -> None:
        """Drop a run's blocks; a reader that still reads from it keeps what it has."""
        with self._lock:
            if run in self._runs:
                self._runs.remove(run)
        self._budget.given_back(run)

    def _run_at(self, position: int, stop: int) -> tuple[_Run, list[_Run]]:
        """The run whose blocks hold `[position, stop)`, and those that are over."""
        run = next((run for run in self._runs if run.covers(position)), None)
        ahead = self._blocks_ahead
        if run is None:
            run, ahead = _Run(position), 0
        else:
            self._runs.remove(run)
            run.forget_before(position)
        while run.stop < stop:
            self._ask(run, min(stop, self._block_end(run.stop)))
        while run.stop < self._size and run.ahead_of(stop) < ahead:
            self._ask(run, min(self._size, self._block_end(run.stop)))
        self._runs.append(run)
        left, self._runs = self._runs[:-RUNS_MAX], self._runs[-RUNS_MAX:]
        if stop == self._size:
            left.append(self._runs.pop())
        return run, left

    def _block_end(self, position: int) -> int:
        # Whole multiples: stores keep an object in parts, and a range that lies in one part costs less.
        return (position // self._block_bytes + 1) * self._block_bytes

    def _ask(self, run: _Run, stop: int) -> None:
        run.blocks.append((run.stop, asked_of(self._pool, self._fetch, run.stop, stop)))
        run.stop = stop
