"""Which job begins next: decisions alone, without a thread and without a clock.

A job belongs to a class of work, which has so many threads; it has a key, which is what it may wait for (a shard, a
topic, the metadata store), and a caller. No key and no caller has more than its share of a class. A job that has been
at work for longer than its class allows makes its key *suspect*: the job is given up, so that it no longer counts for
its class and its caller, and another thread works in its place. It counts for its key until it comes back: so what
hangs costs its own key alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from forebay.errors import Unavailable

GIVEN_UP_MAX: Final = 256
"""So many threads are left to suspect keys, whatever their class. Beyond that jobs of suspect keys are refused."""
SHARES: Final = 4
"""A key, or a caller, has at most one thread of so many in a class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkClass:
    """A kind of work, and how many threads it has."""

    name: str
    threads: int
    """Jobs that are at work at the same time; those that were given up come on top."""
    slow_s: float
    """A job that is at work for longer makes its key suspect."""
    per_key: int | None = None
    """Jobs of one key that are at work at the same time, those that were given up too; `None` for a share."""

    @property
    def share(self) -> int:
        """What one caller has at most."""
        return max(1, self.threads // SHARES)

    @property
    def key_max(self) -> int:
        """What one key has at most."""
        return self.share if self.per_key is None else self.per_key


@dataclass(slots=True, eq=False, kw_only=True)
class KeyedJob:
    """Something to be done in a thread. Compared by identity."""

    kind: WorkClass
    key: Hashable
    caller: str = ""
    deadline: float | None = None
    """A job that has not begun by then is refused; `None` if it waits for as long as it takes."""
    began: float | None = field(default=None, init=False)
    is_given_up: bool = field(default=False, init=False)


J = TypeVar("J", bound=KeyedJob)
T = TypeVar("T", bound=Hashable)


class _Work(Generic[J]):
    """What waits and what is at work in one class."""

    def __init__(self, kind: WorkClass) -> None:
        self.kind = kind
        self.waiting: dict[str, dict[Hashable, dict[J, None]]] = {}
        """By caller and key, those whose turn is next come first. No line is empty."""
        self.at_work: dict[J, None] = {}
        """Those that count, in the order in which they began."""
        self.keys: Counter[Hashable] = Counter()
        """Jobs at work by key, those that were given up too."""
        self.callers: Counter[str] = Counter()
        self.suspects: Counter[Hashable] = Counter()
        """By key, how many of its jobs were given up and have not come back."""


class Schedule(Generic[J]):
    """All jobs that wait or are at work. The caller holds a lock over each call, and says what time it is."""

    def __init__(self, *, crowds: Collection[str] = ("",), given_up_max: int = GIVEN_UP_MAX) -> None:
        """`crowds` are callers that stand for any number of others: they may have all threads of a class."""
        self._crowds = crowds
        self._given_up_max = given_up_max
        self._works: dict[WorkClass, _Work[J]] = {}
        self.given_up = 0
        """Jobs at work whose keys are suspect, and that no longer count."""

    @property
    def is_degraded(self) -> bool:
        """Whether as many threads are left to suspect keys as may be."""
        return self.given_up >= self._given_up_max

    def suspects(self) -> list[Hashable]:
        """The keys whose jobs do not come back, each once."""
        return list(dict.fromkeys(key for work in self._works.values() for key in work.suspects))

    def waiting(self, kind: WorkClass, caller: str) -> int:
        """How many jobs of a caller have to wait: those that may begin as soon as a thread looks do not count."""
        work = self._works.get(kind)
        if work is None or caller not in work.waiting:
            return 0
        lines = work.waiting[caller]
        room = kind.threads - len(work.at_work)
        if caller not in self._crowds:
            room = min(room, kind.share - work.callers[caller])
        may_begin = sum(min(len(line), max(0, kind.key_max - work.keys[key])) for key, line in lines.items())
        return sum(map(len, lines.values())) - min(room, may_begin)

    def add(self, job: J) -> None:
        """Have the job wait for its turn; `Unavailable` if its key is suspect and no thread may be left to it."""
        work = self._works.setdefault(job.kind, _Work(job.kind))
        if self.is_degraded and job.key in work.suspects:
            raise Unavailable(
                f"calls at {job.key} do not come back, and {self.given_up} threads wait for such calls already: "
                "nothing was done; look at the disk or the store"
            )
        work.waiting.setdefault(job.caller, {}).setdefault(job.key, {})[job] = None

    def take(self, now: float) -> J | None:
        """The job to be done next, which is at work from now on; `None` if none may begin."""
        for work in self._works.values():
            job = self._choice(work)
            if job is not None:
                self._remove(work, job, is_turn=True)
                job.began = now
                work.at_work[job] = None
                work.keys[job.key] += 1
                work.callers[job.caller] += 1
                return job
        return None

    def can_take(self) -> bool:
        """Whether a job may begin now."""
        return any(self._choice(work) is not None for work in self._works.values())

    def end(self, job: J) -> None:
        """A job that was at work has come back."""
        work = self._works[job.kind]
        _count_down(work.keys, job.key)
        if job.is_given_up:
            self.given_up -= 1
            _count_down(work.suspects, job.key)
        else:
            del work.at_work[job]
            _count_down(work.callers, job.caller)

    def withdraw(self, job: J) -> bool:
        """A job is not wanted any more; whether it waited, and now does not."""
        work = self._works.get(job.kind)
        if work is None or job not in work.waiting.get(job.caller, {}).get(job.key, {}):
            return False
        self._remove(work, job, is_turn=False)
        return True

    def give_up_slow(self, now: float) -> list[J]:
        """Give up the jobs that have been at work for too long, so far as threads may be left to them.

        The first of each key that is suspect from now on.
        """
        found = []
        for work in self._works.values():
            for job in list(work.at_work):
                assert job.began is not None, "it is at work"
                if job.began + work.kind.slow_s > now or self.is_degraded:
                    break
                del work.at_work[job]
                _count_down(work.callers, job.caller)
                job.is_given_up = True
                if job.key not in work.suspects:
                    found.append(job)
                work.suspects[job.key] += 1
                self.given_up += 1
        return found

    def refuse_late(self, now: float) -> list[J]:
        """The jobs that have not begun by their deadline: they wait no more."""
        late = [job for job in self._all_waiting() if job.deadline is not None and job.deadline <= now]
        for job in late:
            self._remove(self._works[job.kind], job, is_turn=False)
        return late

    def refuse_all(self) -> list[J]:
        """All jobs that wait: they wait no more."""
        found = list(self._all_waiting())
        for work in self._works.values():
            work.waiting.clear()
        return found

    def is_suspect(self, job: J) -> bool:
        """Whether other jobs at the same key do not come back."""
        return job.key in self._works[job.kind].suspects

    def has_waiting(self) -> bool:
        """Whether a job waits."""
        return any(work.waiting for work in self._works.values())

    def _all_waiting(self) -> Iterator[J]:
        for work in self._works.values():
            for lines in work.waiting.values():
                for line in lines.values():
                    yield from line

    def _choice(self, work: _Work[J]) -> J | None:
        """The job of the caller whose turn it is; one at a suspect key only if there is no other."""
        if len(work.at_work) >= work.kind.threads:
            return None
        suspect: J | None = None
        for caller, lines in work.waiting.items():
            if caller not in self._crowds and work.callers[caller] >= work.kind.share:
                continue
            for key, line in lines.items():
                if work.keys[key] >= work.kind.key_max:
                    continue
                if key not in work.suspects:
                    return next(iter(line))
                if suspect is None and not self.is_degraded:
                    suspect = next(iter(line))
        return suspect

    def _remove(self, work: _Work[J], job: J, *, is_turn: bool) -> None:
        """Take a job out of its line. If it was its turn, its caller and its key come behind the others."""
        lines = work.waiting[job.caller]
        line = lines[job.key]
        del line[job]
        if is_turn or not line:
            del lines[job.key]
            if line:
                lines[job.key] = line
        if is_turn or not lines:
            del work.waiting[job.caller]
            if lines:
                work.waiting[job.caller] = lines


def _count_down(counter: Counter[T], key: T) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
