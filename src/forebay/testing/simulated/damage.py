"""What a power cut may do to the unsynced bytes of one file: every kind of damage, as pure functions.

Knows one file's durable bytes and the changes since; knows nothing of names. Bytes that were synced
and not written over since are never touched, whatever the kind.
"""

from __future__ import annotations

import enum
import random  # noqa: TID251  # seeded by the caller: the same states again
from collections.abc import Callable, Iterator, Sequence

from forebay.testing.simulated.durability import ByteChange, ByteOperation, WriteStanding, replay
from forebay.testing.simulated.trace import TracedWrite

SECTOR = 512


class CrashDamage(enum.Enum):
    """How the unsynced part of the disk came out of the crash. The value is what a table prints."""

    KILLED = "kill -9"
    """The process died, the system lives: every finished write is there, the one in flight perhaps in part."""
    OLD = "old content"
    """No unsynced byte arrived."""
    WHOLE = "everything"
    """Every unsynced byte arrived."""
    CUT = "cut"
    """Writes arrived in order up to somewhere inside one of them."""
    HALF_ZERO = "half zero"
    """The size arrived, but one half of a write reads as zeros."""
    ALL_ZERO = "all zero"
    """The size arrived, the bytes did not."""
    GARBLED = "garbled"
    """Some other bytes stand where a write should be."""
    REORDERED = "reordered"
    """A later change arrived without an earlier one."""


POWER = tuple(damage for damage in CrashDamage if damage is not CrashDamage.KILLED)


class DamagedFile:
    """One file with unsynced changes, and what may be left of it."""

    def __init__(self, durable: bytes, changes: Sequence[ByteChange]) -> None:
        self._durable = durable
        self._operations = [change.operation for change in changes]
        self._open = [index for index, change in enumerate(changes) if change.standing is not WriteStanding.DURABLE]
        self.old = self._only(set())
        self.whole = replay(durable, self._operations)

    def outcomes(self, damage: CrashDamage, chance: random.Random) -> Iterator[bytes]:
        """What the file may hold after this damage, the most instructive first; some may be equal."""
        order = self._in_revealing_order(chance)
        match damage:
            case CrashDamage.OLD:
                yield self.old
            case CrashDamage.WHOLE | CrashDamage.KILLED:
                yield self.whole
            case CrashDamage.CUT:
                yield from self._cut(order)
            case CrashDamage.HALF_ZERO:
                yield from self._each_write(order, _half_zero)
            case CrashDamage.ALL_ZERO:
                yield from self._all_zero(order)
            case CrashDamage.GARBLED:
                yield from self._each_write(order, lambda data: _garbled(data, chance))
            case CrashDamage.REORDERED:
                yield from self._reordered(order, chance)

    def _cut(self, order: list[int]) -> Iterator[bytes]:
        for index in order:
            before = {earlier for earlier in self._open if earlier < index}
            operation = self._operations[index]
            yield self._only(before)
            if isinstance(operation, TracedWrite):
                for length in cuts(operation):
                    yield self._only(before | {index}, {index: operation._replace(data=operation.data[:length])})

    def _all_zero(self, order: list[int]) -> Iterator[bytes]:
        zeroed = {index: _zeros(self._operations[index]) for index in self._open}
        yield self._only(set(self._open), zeroed)
        for index in order:
            yield self._only(set(self._open), {index: zeroed[index]})

    def _reordered(self, order: list[int], chance: random.Random) -> Iterator[bytes]:
        if len(self._open) > 1:
            yield self._only({self._open[-1]})
        for index in order:
            operation = self._operations[index]
            if index != self._open[-1]:
                yield self._only(set(self._open) - {index})
            if isinstance(operation, TracedWrite):
                for later in _later_sectors(operation):
                    yield self._only(set(self._open), {index: later})
        for _ in range(len(self._open) - 2):
            last = chance.randrange(1, len(self._open))
            yield self._only({index for index in self._open[:last] if chance.random() < 0.5} | {self._open[last]})

    def _each_write(self, order: list[int], damaged: Callable[[bytes], Iterator[bytes]]) -> Iterator[bytes]:
        """The file with one write after the other damaged and all the rest there."""
        for index in order:
            operation = self._operations[index]
            if isinstance(operation, TracedWrite):
                for data in damaged(operation.data):
                    yield self._only(set(self._open), {index: operation._replace(data=data)})

    def _in_revealing_order(self, chance: random.Random) -> list[int]:
        """The last change, the first, then the others by chance: so that a bound cuts off the least instructive."""
        if len(self._open) < 3:
            return self._open[::-1]
        between = self._open[1:-1]
        chance.shuffle(between)
        return [self._open[-1], self._open[0], *between]

    def _only(self, arrived: set[int], instead: dict[int, ByteOperation] | None = None) -> bytes:
        """The file if of its open changes only these arrived, some of them as something else."""
        at_risk = set(self._open)
        instead = instead or {}
        return replay(
            self._durable,
            [
                instead.get(index, operation)
                for index, operation in enumerate(self._operations)
                if index not in at_risk or index in arrived
            ],
        )


def cuts(write: TracedWrite) -> list[int]:
    """Lengths at which a write may break off: in and behind a 16-byte header, on and off 8 bytes, at a sector."""
    length = len(write.data)
    sector = SECTOR - write.position % SECTOR
    last_sector = length - (write.position + length) % SECTOR
    places = {1, 8, 12, 16, 17, length // 2, length // 2 & ~7, sector, last_sector, length - 8, length - 1}
    return sorted(place for place in places if 0 < place < length)


def _half_zero(data: bytes) -> Iterator[bytes]:
    middle = len(data) // 2 if len(data) <= SECTOR else len(data) // 2 // SECTOR * SECTOR or SECTOR
    yield data[:middle] + bytes(len(data) - middle)
    yield bytes(middle) + data[middle:]


def _garbled(data: bytes, chance: random.Random) -> Iterator[bytes]:
    yield chance.randbytes(len(data))
    middle = len(data) // 2
    yield data[:middle] + chance.randbytes(len(data) - middle)
    bit = chance.randrange(len(data) * 8)
    yield data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def _zeros(operation: ByteOperation) -> ByteOperation:
    return operation._replace(data=bytes(len(operation.data))) if isinstance(operation, TracedWrite) else operation


def _later_sectors(write: TracedWrite) -> Iterator[TracedWrite]:
    """The write without its first sector, and with its last sector alone."""
    first = SECTOR - write.position % SECTOR
    last = (write.position + len(write.data) - 1) // SECTOR * SECTOR - write.position
    for skipped in {first, last}:
        if 0 < skipped < len(write.data):
            yield write._replace(position=write.position + skipped, data=write.data[skipped:])
