"""Every order in which a few small programs may reach one metadata store, with faults in between.

No threads: a program whose only input are the answers of the store is run again from its start with the
answers so far, up to the call that comes next. Moments from which the same can happen are looked at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from forebay.errors import Indeterminate
from forebay.metadata import Compare, Entry, MemoryMetadata, MetadataStore, Operation, Outcome
from forebay.metadata.memory import MemoryState
from forebay.testing.checks.invariants import Violation

Report: TypeAlias = Callable[[object], None]
Program: TypeAlias = Callable[[MetadataStore, Report], None]
"""What one owner does: a function of the answers it gets and of nothing else. What it reports is kept."""
Answer: TypeAlias = object


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What a program asks of the store, at one place of one way through it."""

    method: str
    arguments: tuple[object, ...]


class _Reached(BaseException):
    """A program has come to a call whose answer is not known yet."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.call = call


class _Answering(MemoryMetadata):
    """Gives the answers of before, one after the other."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        super().__init__()
        self._answers = iter(answers)

    def get(self, key: str) -> Entry | None:
        return self._next("get", key)  # type: ignore[return-value]  # what such a call was answered before

    def range(self, prefix: str, *, start_after: str | None = None, limit: int | None = None) -> list[Entry]:
        assert start_after is None and limit is None
        return list(self._next("range", prefix))  # type: ignore[call-overload, no-any-return]  # likewise

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        return self._next("transaction", tuple(compares), tuple(operations))  # type: ignore[return-value]  # likewise

    def session_alive(self, session: str) -> bool:
        return bool(self._next("session_alive", session))

    def _next(self, method: str, *arguments: object) -> Answer:
        for answer in self._answers:
            if isinstance(answer, Exception):
                raise answer
            return answer
        raise _Reached(Call(method, arguments))


LOST = Indeterminate("injected: the answer was lost")


@dataclass(frozen=True, slots=True, eq=False)
class ProgramStanding:
    """How far one program has come. There is one for each way there, so that it can be compared by identity."""

    answers: tuple[Answer, ...] = ()
    reported: tuple[object, ...] = ()
    call: Call | None = None
    """What it asks next; `None` if it has ended."""


@dataclass(frozen=True, slots=True, eq=False)
class WorldState:
    """What the store holds, and how it came there. Compared by identity, too."""

    memory: MemoryState = field(default_factory=MemoryState)
    committed: tuple[tuple[int, tuple[Operation, ...]], ...] = ()
    """What succeeded, in order, with whose it was."""


class Moment(NamedTuple):
    """A moment of a schedule: the store, all programs, and what may still go wrong. Equal if the same can follow."""

    recorded: WorldState
    standings: tuple[ProgramStanding, ...]
    sessions: frozenset[str]
    faults: int
    endings: int
    """How many sessions may still end while their owners live."""
    late: tuple[tuple[int, Call], ...] = ()
    """Transactions on their way, with whose they are."""

    def with_standing(self, index: int, standing: ProgramStanding) -> Moment:
        """The same with one program further on."""
        return self._replace(standings=(*self.standings[:index], standing, *self.standings[index + 1 :]))


class Exploration:
    """All schedules of some programs, each known by its session: what was seen on the way.

    `judge` looks at each moment after a commit, and at each end. `on_write` is called with each transaction that
    reaches the store: when, whose, and whether it succeeded.
    """

    def __init__(
        self,
        programs: Mapping[str, Program],
        judge: Callable[[Moment], Iterable[Violation]],
        on_write: Callable[[Moment, int, bool], None],
    ) -> None:
        self.violations: dict[str, Moment] = {}
        self._sessions = tuple(programs)
        self._programs = tuple(programs.values())
        self._judge = judge
        self._on_write = on_write
        self._schedules: dict[Moment, int] = {}
        self._looked: set[tuple[WorldState, tuple[tuple[object, ...], ...]]] = set()
        self._answers: dict[tuple[WorldState, frozenset[str], int, Call], tuple[WorldState, Answer]] = {}
        self._standings: dict[tuple[int, ProgramStanding | None, Answer], ProgramStanding] = {}
        self._recorded: dict[tuple[WorldState, int, tuple[Operation, ...]], WorldState] = {}

    @property
    def moments(self) -> int:
        """How many different ones there were."""
        return len(self._schedules)

    def explore(self, *, faults: int, endings: int) -> int:
        """How many schedules there are; everything that was broken is in `violations`."""
        standings = tuple(self._run(index, None, None) for index in range(len(self._programs)))
        return self._from(Moment(WorldState(), standings, frozenset(self._sessions), faults, endings))

    def _from(self, moment: Moment) -> int:
        known = self._schedules.get(moment)
        if known is None:
            following = list(self._following(moment))
            if not following:
                self._look(moment)
            known = self._schedules[moment] = sum(map(self._from, following)) or 1
        return known

    def _look(self, moment: Moment) -> None:
        seen = (moment.recorded, tuple(standing.reported for standing in moment.standings))
        if seen not in self._looked:
            self._looked.add(seen)
            for violation in self._judge(moment):
                self.violations.setdefault(str(violation), moment)

    def _following(self, moment: Moment) -> Iterator[Moment]:
        for index, standing in enumerate(moment.standings):
            if standing.call is not None:
                yield from self._steps(moment, index, standing)
        for place, (index, call) in enumerate(moment.late):
            rest = moment.late[:place] + moment.late[place + 1 :]
            yield self._reached(moment._replace(late=rest), index, call)[0]
        if moment.endings:
            for session in sorted(moment.sessions):
                yield moment._replace(sessions=moment.sessions - {session}, endings=moment.endings - 1)

    def _steps(self, moment: Moment, index: int, standing: ProgramStanding) -> Iterator[Moment]:
        """The call is answered; or its answer is lost, before or after it was done, or it is done later; or a crash."""
        assert standing.call is not None
        after, answer = self._reached(moment, index, standing.call)
        yield after.with_standing(index, self._run(index, standing, answer))
        if not moment.faults or standing.call.method != "transaction":
            # Who dies over a read has left no more behind than who dies before the write that follows.
            return
        fewer = moment._replace(faults=moment.faults - 1)
        lost = self._run(index, standing, LOST)
        yield after._replace(faults=fewer.faults).with_standing(index, lost)
        yield fewer._replace(late=(*fewer.late, (index, standing.call))).with_standing(index, lost)
        dead = self._standings.setdefault(
            (index, standing, "dies"), ProgramStanding(standing.answers, standing.reported)
        )
        yield fewer._replace(sessions=moment.sessions - {self._sessions[index]}).with_standing(index, dead)

    def _reached(self, moment: Moment, index: int, call: Call) -> tuple[Moment, Answer]:
        """The call reaches the store."""
        asked = (moment.recorded, moment.sessions, index, call)
        known = self._answers.get(asked)
        if known is None:
            known = self._answers[asked] = self._asked(moment, index, call)
        recorded, answer = known
        after = moment if recorded is moment.recorded else moment._replace(recorded=recorded)
        if isinstance(answer, Outcome):
            self._on_write(moment, index, answer.succeeded)
            if answer.succeeded:
                self._look(after)
        return after, answer

    def _asked(self, moment: Moment, index: int, call: Call) -> tuple[WorldState, Answer]:
        store = MemoryMetadata(replace(moment.recorded.memory, sessions=moment.sessions))
        answer = getattr(store, call.method)(*call.arguments)
        if call.method == "range":
            return moment.recorded, tuple(answer)
        if not isinstance(answer, Outcome) or not answer.succeeded:
            return moment.recorded, answer
        return self._record(moment.recorded, index, call, store), answer

    def _record(self, before: WorldState, index: int, call: Call, store: MemoryMetadata) -> WorldState:
        operations: tuple[Operation, ...] = call.arguments[1]  # type: ignore[assignment]  # as `_Answering` was asked
        made = WorldState(store.snapshot(), (*before.committed, (index, operations)))
        return self._recorded.setdefault((before, index, operations), made)

    def _run(self, index: int, before: ProgramStanding | None, answer: Answer) -> ProgramStanding:
        """The program once it has got this answer, having come to `before`."""
        known = self._standings.get((index, before, answer))
        if known is None:
            answers = (*before.answers, answer) if before is not None else ()
            known = self._standings[index, before, answer] = self._run_again(index, answers)
        return known

    def _run_again(self, index: int, answers: tuple[Answer, ...]) -> ProgramStanding:
        reported: list[object] = []
        try:
            self._programs[index](_Answering(answers), reported.append)
        except _Reached as reached:
            return ProgramStanding(answers, tuple(reported), reached.call)
        return ProgramStanding(answers, tuple(reported))
