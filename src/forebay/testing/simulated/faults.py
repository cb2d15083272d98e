"""Failures on demand: which call of a simulated disk fails, how, and plans that try them all in turn.

Knows calls by index, kind and path; knows nothing of files. A plan is made from the calls that one
fault-free run reached: arm a fresh disk with each fault in turn and run again.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

OPENS = frozenset({"create", "open", "lock", "list_directory", "sync_directory", "sync_filesystem"})
GROWS = frozenset({"create", "write", "truncate", "sync", "rename", "link", "make_directory", "sync_directory", "lock"})

AT_EVERY_CALL = (errno.EIO, errno.ENOSPC, errno.EMFILE)
_REACHES = {errno.ENOSPC: GROWS, errno.EMFILE: OPENS}


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the seam."""

    index: int
    kind: str
    path: str


Match: TypeAlias = Callable[[Call], bool]


class Fault:
    """What goes wrong where `matches` says so, `times` times (`None`: until healed).

    With `taken`, a write takes that many bytes first; without an error that is a short write.
    With `after`, the call does its work and fails nevertheless, as a call may whose answer got lost.
    """

    def __init__(
        self,
        matches: Match,
        number: int | None,
        *,
        times: int | None = 1,
        taken: int | None = None,
        after: bool = False,
    ) -> None:
        self.matches = matches
        self.number = number
        self.times = times
        self.taken = taken
        self.after = after

    def error(self, call: Call) -> OSError:
        assert self.number is not None
        name = errno.errorcode.get(self.number, str(self.number))
        return OSError(self.number, f"{name} injected at {call.kind}, call {call.index}", call.path)


class Faults:
    """The calls that one simulated disk has seen, and the faults that wait for later ones."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self._waiting: list[Fault] = []

    def add(self, fault: Fault) -> None:
        self._waiting.append(fault)

    def clear(self) -> None:
        self._waiting.clear()

    def meet(self, kind: str, path: str) -> tuple[Call, Fault] | None:
        """Count this call; the fault that strikes it, if one does."""
        self.seen.append((kind, path))
        if not self._waiting:
            return None
        call = Call(len(self.seen) - 1, kind, path)
        for fault in self._waiting:
            if fault.matches(call):
                if fault.times is not None:
                    fault.times -= 1
                    if fault.times == 0:
                        self._waiting.remove(fault)
                return call, fault
        return None


class PlannedFault(NamedTuple):
    """One fault of a sweep: arm a fresh disk with it by `disk.plan(planned)`, then run the same scenario."""

    call: Call
    number: int | None
    taken: int | None = None
    lasting: bool = False

    def __str__(self) -> str:
        name = "short write" if self.number is None else errno.errorcode[self.number]
        part = "" if self.taken is None else f" after {self.taken} bytes"
        lasting = " and ever after" if self.lasting else ""
        return f"{name}{part} at call {self.call.index} ({self.call.kind} {self.call.path}){lasting}"

    def fault(self) -> Fault:
        index = self.call.index
        if self.lasting:
            reached = _REACHES.get(self.number or 0)
            return Fault(
                lambda call: call.index >= index and (reached is None or call.kind in reached),
                self.number,
                times=None,
                taken=self.taken,
            )
        return Fault(lambda call: call.index == index, self.number, taken=self.taken)


def plan_faults(
    calls: Iterable[Call], numbers: Iterable[int] = AT_EVERY_CALL, *, short_writes: bool = True, lasting: bool = False
) -> Iterator[PlannedFault]:
    """Each errno at each call that can meet it, and each write cut short (going on, or failing in the middle)."""
    numbers = tuple(numbers)
    for call in calls:
        for number in numbers:
            reached = _REACHES.get(number)
            if reached is None or call.kind in reached:
                yield PlannedFault(call, number, lasting=lasting)
        if short_writes and call.kind == "write":
            yield PlannedFault(call, None, taken=1)
            yield PlannedFault(call, None, taken=17)
            yield PlannedFault(call, errno.EIO, taken=17)
            yield PlannedFault(call, errno.ENOSPC, taken=9)
