"""Owners with pauses, zombies and delayed puts, under schedules made from seeds.

Each directory is a process of its own that a schedule stops at any call of a store, between a sync and its
acknowledgement, or for good; leases end while their owners are in the middle of something, and some do not notice.
"""

from __future__ import annotations

import random  # noqa: TID251  # seeded: the same schedule again
from collections.abc import Callable, Sequence
from typing import Final

import pytest

from forebay.errors import ForebayError
from forebay.format.metadata.descriptor import Phase
from forebay.metadata import Compare, MetadataStore, Operation, Outcome, Put
from forebay.shard.seal import withdraw_target
from forebay.testing.checks.catalogs import references_are_complete
from forebay.testing.checks.history import AppendOutcome as Heard
from forebay.testing.checks.invariants import Violation
from forebay.testing.checks.moves import Operations, commits_of
from forebay.testing.checks.schedules import LockStep, PausingBlobs, PausingMetadata
from forebay.testing.simulated.blobs import Fault as BlobFault
from forebay.testing.simulated.blobs import SimulatedBlobs
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.metadata import Fault as MetadataFault
from forebay.testing.simulated.metadata import FaultyMetadata
from forebay.topics import OnOwnerLoss
from tests.ledger import Ledger
from tests.protocol.consuming import missed_by_consumers
from tests.protocol.environment import KEYS, Node, OwnersEnvironment
from tests.protocol.judging import check_environment
from tests.protocol.scenarios import orphans_are_swept
from tests.support.environments.simulated import GRACE_S
from tests.support.soak import SOAK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far more than needed: a shared machine may be busy

SEEDS: Final = 20_000 if SOAK else 240
PARTS: Final = 4
TICKS: Final = 240
STEPS_MAX: Final = 60
LATE: Final = (BlobFault.LATE, BlobFault.FAIL_AFTER, BlobFault.FAIL_BEFORE, BlobFault.DUPLICATE)


class Watched(FaultyMetadata):
    """What one process writes: it counts what comes after another has the shard."""

    def __init__(self, inner: MetadataStore, environment: OwnersEnvironment) -> None:
        super().__init__(inner)
        self.zombie_writes = 0
        self.violations: list[Violation] = []
        self.node: Node | None = None
        self._environment = environment

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        late = self._is_late(operations)
        outcome = super().transaction(compares, operations)
        self.zombie_writes += late
        if late and outcome.succeeded:
            self.violations.append(Violation("I20", f"written after another had the shard: {operations}"))
        return outcome

    def _is_late(self, operations: Sequence[Operation]) -> bool:
        state = self._environment.state
        if state is None or self.node is None:
            return False
        writes = [
            put for put in operations if isinstance(put, Put) and put.key.startswith(KEYS.state.removesuffix("state"))
        ]
        return bool(writes) and any(shard.epoch < state.epoch for shard in self.node.engine.shards())


class Player:
    """One directory with its process."""

    def __init__(self, play: Play, name: str) -> None:
        self.play = play
        self.name = name
        self.is_stopped = False
        self.watched = Watched(play.environment.metadata, play.environment)
        self.metadata = PausingMetadata(self.watched, play.schedule.pause)
        blobs = PausingBlobs(play.blobs, play.schedule.pause)
        self.node: Node = play.environment.node(name, metadata=self.metadata, store=blobs)
        self.watched.node = self.node
        self.sequence = 0

    def end_lease(self, *, is_blind: bool) -> None:
        """Its session ends for everyone, itself included unless it is blind."""
        session = self.metadata.sessions[-1]
        session.is_blind = is_blind
        self.is_stopped = True
        self.play.environment.inner.end_session(session.id)

    def wake(self) -> None:
        """It goes on where it stopped; later it learns that its session is over."""
        if self.is_stopped:
            self.is_stopped = False
        else:
            for session in self.metadata.sessions:
                session.is_blind = False

    def act(self, action: Callable[[Player], object]) -> None:
        try:
            action(self)
        except ForebayError:
            self.node.let_go()


def _append(player: Player) -> None:
    player.node.append(1 + player.play.chance.randrange(3))


def _produce(player: Player) -> None:
    heard = player.node.append(producing=(ord(player.name), player.sequence))
    player.sequence += heard is Heard.ACKED


def _consume(player: Player) -> None:
    player.node.consume(player.play.chance.choice([2, 5, None]))


def _check(player: Player) -> None:
    for shard in player.node.engine.shards():
        shard.check_owner()
    player.node.let_go()


def _seal(player: Player) -> None:
    player.node.seal(player.play.chance.choice([None, *"abc"]))


def _take_back(player: Player) -> None:
    if not player.node.engine.shards():
        player.node.take_back()


def _export(player: Player) -> None:
    player.node.shard.history.catch_up()


def _retain(player: Player) -> None:
    player.node.shard.history.retain()


def _sweep(player: Player) -> None:
    player.play.environment.clock.advance(GRACE_S + 1)
    player.node.cleanup.collect_owned(player.node.shard)


def _clear(player: Player) -> None:
    player.node.engine.clear_moved(player.play.environment.ref)


ACTIONS: Final[list[tuple[Callable[[Player], object], int]]] = [
    (_append, 12),
    (_produce, 4),
    (_consume, 4),
    (lambda player: player.node.acknowledge_late(), 2),
    (lambda player: player.node.rotate(), 5),
    (_export, 5),
    (lambda player: player.node.shard.reserve_ahead(), 3),
    (_seal, 3),
    (_take_back, 2),
    (_check, 3),
    (_retain, 2),
    (_sweep, 1),
    (_clear, 2),
    (lambda player: player.node.take_over(), 1),
]


class Play:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.schedule = LockStep()
        self.blobs = SimulatedBlobs(clock=ManualClock())
        mode = "local" if seed % 5 == 4 else "shared_fs"
        self.waits = seed % 3 == 2
        policy = OnOwnerLoss.WAIT if self.waits else OnOwnerLoss.TAKE_OVER
        self.environment = OwnersEnvironment(mode, blobs=self.blobs, seed=seed, on_owner_loss=policy)
        self.environment.on_commit = self._committed
        self.violations: list[Violation] = []
        self.players = {name: Player(self, name) for name in "abc"}

    def _committed(self, operations: Operations) -> None:
        for commit in commits_of(KEYS, [operations]):
            self.violations += references_are_complete(commit.pieces, self.environment.fetch)

    def run(self) -> list[Violation]:
        """To its end: whoever still waits goes on, whatever is late lands, and one owner has it all."""
        for _ in range(TICKS):
            self._tick()
        while self.schedule.waiting:
            self.schedule.step(self.chance.choice(self.schedule.waiting))
        self._environment()
        return [*self.violations, *self._at_the_end()]

    def _tick(self) -> None:
        waiting = self.schedule.waiting
        player = self.players[self.chance.choice("aaabbc")]
        dice = self.chance.random()
        if dice < 0.04:
            self._overtake(self._owner(player))
        elif dice < 0.06:
            player.wake()
        elif player.is_stopped:
            return
        elif dice < 0.08:
            player.watched.inject(self.chance.choice(list(MetadataFault)), after=self.chance.randrange(2))
        elif dice < 0.11:
            self.blobs.inject(self.chance.choice(LATE), method=self.chance.choice(["upload", "put_if_absent"]))
        elif dice < 0.14:
            self._environment()
        elif player.name in waiting:
            # Some run far before anyone else does, as some do.
            for _ in range(self.chance.choice([1, 2, 4, 8, 40])):
                if player.name in self.schedule.waiting:
                    self.schedule.step(player.name)
        else:
            [action] = self.chance.choices([action for action, _ in ACTIONS], [weight for _, weight in ACTIONS])
            self.schedule.begin(player.name, lambda: player.act(action))

    def _overtake(self, owner: Player) -> None:
        """Its lease ends; half of the time when it stands right before a write."""
        if self.chance.random() < 0.5:
            for _ in range(STEPS_MAX):
                if owner.name not in self.schedule.waiting or owner.metadata.is_about_to_write:
                    break
                self.schedule.step(owner.name)
        owner.end_lease(is_blind=self.chance.random() < 0.5)

    def _owner(self, otherwise: Player) -> Player:
        state = self.environment.state
        return self.players.get(state.holder or "", otherwise) if state is not None else otherwise

    def _environment(self) -> None:
        self.blobs.land()
        for player in self.players.values():
            player.watched.land()

    def _next_holder(self) -> str:
        state = self.environment.state
        is_free = self.environment.settings.is_shared and not (self.waits and self.chance.random() < 0.5)
        if is_free or state is None or state.phase is Phase.SEALED:
            return self.chance.choice("abc")
        # What lies in one directory alone goes on there, and so does what waits for its owner.
        return state.holder or "a"

    def _at_the_end(self) -> list[Violation]:
        self.blobs.heal()
        self.environment.inner.end_all_sessions()
        withdraw_target(self.environment.metadata, KEYS.state, clock=ManualClock())
        last = self.environment.node(self._next_holder())
        if self.waits and self.environment.settings.is_shared:
            last.take_over()
        if last.append() is not Heard.ACKED:
            return [Violation("I33", "nobody can go on with the shard")]
        found = [violation for player in self.players.values() for violation in player.watched.violations]
        last.export()
        last.consume()
        reading = last.reading()
        found += [
            *check_environment(self.environment, reading),
            *missed_by_consumers(self.environment.disk.trace.notes(), reading.records),
        ]
        # In mode local what a seal cut short has left is there for the next one.
        return [*found, *orphans_are_swept(self.environment, last)] if self.environment.settings.is_shared else found


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.proves("I18", "I19", "I20", "I21", "I25", "I33", "I41")
def test_no_schedule_of_owners_breaks_a_promise(part: int, ledger: Ledger) -> None:
    broken: list[str] = []
    zombie_writes = takeovers = 0
    for seed in range(part, SEEDS, PARTS):
        play = Play(seed)
        try:
            violations = play.run()
        finally:
            play.schedule.end()
        ledger.count("schedules, seeded")
        ledger.count("steps of these schedules", n=play.schedule.steps)
        if violations:
            ledger.violation("schedules, seeded")
        broken += [f"seed {seed}: {violation}" for violation in violations]
        zombie_writes += sum(player.watched.zombie_writes for player in play.players.values())
        takeovers += len(play.environment.openings)
    ledger.count("zombie writes", n=zombie_writes)
    ledger.count("owners that followed each other", n=takeovers)
    assert broken[:10] == []
    assert zombie_writes > 0
