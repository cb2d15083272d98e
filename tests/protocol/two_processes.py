"""Schedules of two processes with one metadata store: what they do, and a model of what must hold.

The processes create, append, delete, create again, alter, export, move there and back, take over with and without a
yes, die and come back. Handles are kept and used long after. The model knows nothing of how the processes run: a
`Stage` opens, ends and kills them, in this process (`SimulatedStage`) or as children of it.
"""

from __future__ import annotations

import contextlib
import random  # noqa: TID251  # seeded: the same schedule again
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Concatenate, Final, NamedTuple, ParamSpec, Protocol, TypeVar

from forebay.errors import ForebayError, UnknownTopic
from forebay.metadata import MetadataStore
from forebay.settings import MetadataSettings
from forebay.storage import Storage, Topic
from forebay.testing.checks.invariants import Violation
from forebay.testing.inside import inside
from forebay.topics import Durability, OnOwnerLoss, TopicName, TopicSpec
from tests.support.environments.peers import STALE, Peer, Peers

P = ParamSpec("P")
R = TypeVar("R")

MODES: Final = ("shared_fs", "local")
TOPIC: Final = "shop/orders"
PARTITIONS_MAX: Final = 4
OPERATOR: Final = "an operator"


class ChildDied(Exception):
    """The process died in the midst of a step: what it would have answered is not known."""


class HeldTopic(NamedTuple):
    """A handle that a process keeps, by its number, and the topic that it is of."""

    number: int
    spec: TopicSpec


class ScheduledOwner:
    """What a process does with its log when the schedule says so. Arguments and answers may cross a pipe."""

    def __init__(self, log: Storage) -> None:
        self.log = log
        self._handles: list[Topic] = []

    def directory_id(self) -> str:
        assert self.log.directory_id is not None
        return self.log.directory_id

    def create(self, partitions: int, durability: str, *, takes_over: bool = False) -> HeldTopic:
        """The topic; with `takes_over` it accepts every loss, else what its class says."""
        if takes_over:
            topic = self.log.create_topic(
                TOPIC, partitions=partitions, durability=durability, on_owner_loss="take_over"
            )
        else:
            topic = self.log.create_topic(TOPIC, partitions=partitions, durability=durability)
        return self._held(topic)

    def handle(self) -> HeldTopic:
        """Another handle on the topic, as this process knows it."""
        return self._held(self.log.topic(TOPIC))

    def stored(self) -> TopicSpec | None:
        """The topic of this name by what is stored, not by what this process may remember for a second."""
        try:
            return inside(self.log).definitions.look(TopicName.parse(TOPIC)).spec
        except UnknownTopic:
            return None

    def append(self, handle: int, value: bytes, partition: int) -> int:
        return self._handles[handle].append(value, partition=partition)

    def delete(self) -> None:
        self.log.delete_topic(TOPIC)

    def alter(self) -> None:
        self.log.alter_topic(TOPIC, partitions=min(self.log.topic(TOPIC).partitions + 1, PARTITIONS_MAX))

    def export(self) -> None:
        self.log.export_topic(TOPIC)

    def move(self, target: str | None, *, takes_back: bool) -> None:
        self.log.check_held_here(TOPIC)
        self.log.seal_topic(TOPIC, target=target)
        if takes_back:
            self.log.unseal_topic(TOPIC)

    def take_over(self, partition: int, *, accept_loss: bool) -> None:
        self.log.take_over(TOPIC, partition, accept_loss=accept_loss, by=OPERATOR if accept_loss else None)

    def lapse(self) -> None:
        """The lease of the process runs out."""
        inside(self.log).lose_session()

    def follow(self) -> None:
        """What the background does within a second."""
        log = inside(self.log)
        log.follow_all_changes()
        log.end_deleted()

    def settle(self) -> None:
        """What the background does now and then, once every grace is over."""
        log = inside(self.log)
        log.follow_all_changes()
        log.end_deleted()
        log.deletions.finish()
        log.clear_moved()
        log.remove_late_objects()

    def read(self, partition: int) -> list[tuple[int, bytes | None]]:
        """The records of a partition, from this process's log or by history."""
        records = self.log.topic(TOPIC).read(partition=partition, on_gap=lambda place, gap: None)
        return [(record.offset, record.value) for record in records]

    def losses(self, topic_id: str, partition: int) -> list[tuple[int, int, str]]:
        """The ranges of a partition whose loss is recorded as accepted, and by whom; none if the topic is gone."""
        with contextlib.suppress(UnknownTopic):
            states = [shard.state for shard in self.log.recorded(TOPIC) if shard.partition == partition]
            return [
                (loss.start, loss.stop, loss.by)
                for state in states
                if state is not None and state.incarnation == topic_id
                for loss in state.losses
            ]
        return []

    def _held(self, topic: Topic) -> HeldTopic:
        self._handles.append(topic)
        return HeldTopic(len(self._handles) - 1, topic.spec)


class Stage(Protocol):
    """Where the processes of a schedule run."""

    def open(self, name: str) -> None:
        """Start the process that has this directory."""

    def do(
        self, name: str, step: Callable[Concatenate[ScheduledOwner, P], R], *arguments: P.args, **options: P.kwargs
    ) -> R:
        """Have a process do something; what it answers, or the error that it met. `ChildDied` if it died meanwhile."""

    def end(self, name: str) -> None:
        """Close a process in order. `ChildDied` if it died of that."""

    def kill(self, name: str) -> None:
        """End it as kill -9 does. For other processes its session is over."""

    def die_inside(self, name: str, call: int) -> bool:
        """Have a process die inside its next step, before that call of a seam; false where a stage cannot do that."""

    def let_pass(self) -> None:
        """Let so much time pass that no process goes by what it remembers of definitions, and every grace is over."""

    def stored(self) -> list[str]:
        """Everything in the metadata store, by key."""

    def close(self) -> None:
        """End all of them."""


class SimulatedStage:
    """Both processes in this one, on a simulated disk; the metadata store is a real one where `metadata` opens one."""

    def __init__(
        self,
        mode: str,
        metadata: Callable[[], MetadataStore] | None = None,
        settings: MetadataSettings | None = None,
    ) -> None:
        self._peers = Peers(mode=mode, metadata=metadata, settings=settings)
        self._open: dict[str, tuple[Peer, ScheduledOwner]] = {}

    def open(self, name: str) -> None:
        peer = self._peers.open(name)
        self._open[name] = peer, ScheduledOwner(peer.log)

    def do(
        self, name: str, step: Callable[Concatenate[ScheduledOwner, P], R], *arguments: P.args, **options: P.kwargs
    ) -> R:
        return step(self._open[name][1], *arguments, **options)

    def end(self, name: str) -> None:
        self._peers.end(self._open.pop(name)[0])

    def kill(self, name: str) -> None:
        self._peers.kill(self._open.pop(name)[0])

    def die_inside(self, name: str, call: int) -> bool:
        return False

    def let_pass(self) -> None:
        self._peers.clock.advance(self._peers.settings.export.orphan_grace_s + STALE)

    def stored(self) -> list[str]:
        return self._peers.stored()

    def close(self) -> None:
        self._peers.close()


@dataclass(slots=True)
class TopicFacts:
    """What is known of one topic, for ever: there may be others of its name."""

    spec: TopicSpec
    acknowledged: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """By partition and offset."""
    tried: set[bytes] = field(default_factory=set)
    """Every value that an append was asked to store."""
    accepted: set[int] = field(default_factory=set)
    """Partitions of which an operator accepted a loss."""
    unflushed: bool = False
    """A process was killed since: what class memory had only queued is gone, as it says."""
    is_asked_to_go: bool = False
    """A deletion was begun."""
    is_deleted: bool = False
    """A deletion has returned."""
    seen_by: set[str] = field(default_factory=set)
    """Processes that have looked since it was deleted."""


class OwnersSchedule:
    """One schedule: a sequence of steps that a seed decides, and whatever of it was broken."""

    def __init__(self, seed: int, stage: Stage, *, steps: int) -> None:
        self.random = random.Random(seed)
        self.stage = stage
        self.steps = steps
        self.ids: dict[str, str] = {}
        self.open: set[str] = set()
        self.handles: dict[str, list[HeldTopic]] = {name: [] for name in "AB"}
        self.topics: dict[str, TopicFacts] = {}
        self.violations: list[Violation] = []
        self.count = 0
        self.kills = 0
        self._doing: Callable[[str], None] | None = None

    @property
    def appends(self) -> int:
        """How many were acknowledged."""
        return sum(len(facts.acknowledged) for facts in self.topics.values())

    def run(self) -> list[Violation]:
        """All of it; what was broken."""
        steps = {
            self.create: 3,
            self.append: 20,
            self.delete: 1,
            self.alter: 1,
            self.export: 2,
            self.move: 2,
            self.take_over: 4,
            self.lapse: 2,
            self.kill: 4,
            self.follow: 2,
        }
        for name in "AB":
            self._come_back(name)
        self._attempt(self.create, "A")
        for _ in range(self.steps):
            step = self.random.choices([*steps], [*steps.values()])[0]
            self._attempt(step, self.random.choice("AB"))
        self._judge()
        return self.violations

    def _attempt(self, step: Callable[[str], None], name: str) -> None:
        """A step may be refused; what it then has done is none of what was acknowledged.

        A process that is away comes back for every second step of its own.
        """
        if name not in self.open:
            if self.random.random() < 0.5:
                return
            self._come_back(name)
        is_armed = self.random.random() < 0.15 and self.stage.die_inside(name, self.random.randrange(12))
        try:
            with contextlib.suppress(ForebayError):
                step(name)
            if is_armed and name in self.open:
                self._kill(name)
        except ChildDied:
            self._is_gone(name)

    def _come_back(self, name: str) -> None:
        self.stage.open(name)
        self.open.add(name)
        self.ids[name] = self.stage.do(name, ScheduledOwner.directory_id)

    def _kill(self, name: str) -> None:
        self.stage.kill(name)
        self._is_gone(name)

    def _is_gone(self, name: str) -> None:
        """A process was killed: its handles, and what class memory had only queued."""
        self.kills += 1
        self.open.discard(name)
        self.handles[name] = []
        for facts in self.topics.values():
            facts.unflushed = True

    def _facts(self, spec: TopicSpec) -> TopicFacts:
        """Of a topic; one whose creator died before it could say so is new."""
        return self.topics.setdefault(spec.topic_id, TopicFacts(spec))

    # Steps

    def create(self, name: str) -> None:
        durability = self.random.choice(("fsync", "disk", "memory"))
        takes_over = self.random.random() < 0.25
        partitions = self.random.choice((1, 2))
        held = self.stage.do(name, ScheduledOwner.create, partitions, durability, takes_over=takes_over)
        self._facts(held.spec)
        self.handles[name].append(held)

    def append(self, name: str) -> None:
        if not self.handles[name] or self.random.random() < 0.4:
            self.handles[name].append(self.stage.do(name, ScheduledOwner.handle))
        held = self.random.choice(self.handles[name])
        for _ in range(self.random.randrange(1, 4)):
            self._append(name, held)

    def _append(self, name: str, held: HeldTopic) -> None:
        facts, partition = self._facts(held.spec), self.random.randrange(held.spec.partitions)
        self.count += 1
        value = b"%d" % self.count
        facts.tried.add(value)
        offset = self.stage.do(name, ScheduledOwner.append, held.number, value, partition)
        if (partition, offset) in facts.acknowledged:
            self._report("I4", f"[{partition}] {offset} was given out twice")
        facts.acknowledged[partition, offset] = value
        if name in facts.seen_by:
            self._report("I10", "an append to a topic that was known to be deleted was acknowledged")
        if offset in self._given_up(name, facts, partition):
            self._report("I19", f"[{partition}] {offset} was acknowledged after its loss was accepted")

    def delete(self, name: str) -> None:
        spec = self.stage.do(name, ScheduledOwner.stored)
        if spec is None:
            return
        facts = self._facts(spec)
        facts.is_asked_to_go = True
        self.stage.do(name, ScheduledOwner.delete)
        facts.is_deleted = True
        facts.seen_by.add(name)

    def alter(self, name: str) -> None:
        self.stage.do(name, ScheduledOwner.alter)

    def export(self, name: str) -> None:
        self.stage.do(name, ScheduledOwner.export)

    def move(self, name: str) -> None:
        target = self.random.choice((self.ids["B" if name == "A" else "A"], None))
        self.stage.do(name, ScheduledOwner.move, target, takes_back=self.random.random() < 0.3)

    def take_over(self, name: str) -> None:
        is_yes, spec = self.random.random() < 0.5, self.stage.do(name, ScheduledOwner.stored)
        if spec is not None:
            partition = self.random.randrange(spec.partitions)
            if is_yes:
                self._facts(spec).accepted.add(partition)
            self.stage.do(name, ScheduledOwner.take_over, partition, accept_loss=is_yes)

    def kill(self, name: str) -> None:
        if self.random.random() < 0.4:
            self.stage.end(name)
            self.open.discard(name)
            self.handles[name] = []
        else:
            self._kill(name)

    def lapse(self, name: str) -> None:
        self.stage.do(name, ScheduledOwner.lapse)

    def follow(self, name: str) -> None:
        self.stage.do(name, ScheduledOwner.follow)
        for facts in self.topics.values():
            if facts.is_deleted:
                facts.seen_by.add(name)

    # Judging

    def _judge(self) -> None:
        """Everything acknowledged of the topic that is there is there; nothing else is; nothing else is left."""
        for name in "AB":
            if name in self.open:
                try:
                    self.stage.end(name)
                except ChildDied:
                    self._is_gone(name)
            self._come_back(name)
        self.stage.let_pass()
        spec = self.stage.do("A", ScheduledOwner.stored)
        for topic_id, facts in self.topics.items():
            if not facts.is_asked_to_go and (spec is None or spec.topic_id != topic_id):
                self._report("I41", f"topic {topic_id} is gone, and no process was asked to delete it")
        if spec is not None:
            for partition in range(spec.partitions):
                self._judge_partition(self._facts(spec), partition)
            self.stage.do("B", ScheduledOwner.delete)
        self._judge_left()

    def _judge_left(self) -> None:
        """Nothing is left of topics that were deleted, and the next of the name begins anew."""
        for _ in range(2):
            for name in "AB":
                self.stage.let_pass()
                self.stage.do(name, ScheduledOwner.settle)
        left = [key for key in self.stage.stored() if "/orders" in key or "/late/" in key or "/deleted/" in key]
        if left:
            self._report("I22", f"left of deleted topics: {left}")
        again = self.stage.do("A", ScheduledOwner.create, 1, "fsync")
        if self.stage.do("A", ScheduledOwner.append, again.number, b"again", 0) != 0:
            self._report("I4", "a new topic does not begin at 0")

    def _judge_partition(self, facts: TopicFacts, partition: int) -> None:
        wanted = {offset: value for (at, offset), value in facts.acknowledged.items() if at == partition}
        found = self._found(partition)
        for offset, value in found.items():
            if value not in facts.tried:
                self._report("I10", f"[{partition}] {offset} is {value!r}, which was not appended to this topic")
            elif wanted.get(offset, value) != value:
                self._report("I4", f"[{partition}] {offset} is {value!r}, acknowledged was {wanted[offset]!r}")
        if len(set(found.values())) < len(found):
            self._report("I10", f"[{partition}] a record appears twice: {found}")
        missing = wanted.keys() - found.keys() - self._given_up("A", facts, partition)
        is_promised = facts.spec.durability is not Durability.MEMORY or not facts.unflushed
        if missing and is_promised:
            self._report("I41", f"[{partition}] acknowledged, and gone without a yes: {sorted(missing)}")

    def _given_up(self, name: str, facts: TopicFacts, partition: int) -> set[int]:
        """The offsets whose loss is recorded. Each loss was accepted by an operator, or the topic allows it."""
        offsets: set[int] = set()
        for start, stop, by in self.stage.do(name, ScheduledOwner.losses, facts.spec.topic_id, partition):
            is_allowed = facts.spec.loss_policy is OnOwnerLoss.TAKE_OVER
            if not (partition in facts.accepted if by == OPERATOR else is_allowed):
                self._report("I41", f"[{partition}] [{start}, {stop}) was given up by {by}, whom nobody asked")
            offsets.update(range(start, stop))
        return offsets

    def _found(self, partition: int) -> dict[int, bytes | None]:
        """The records of a partition where its log is, else by its history."""
        found: dict[int, bytes | None] = {}
        for name in "AB":
            with contextlib.suppress(ForebayError):
                for offset, value in self.stage.do(name, ScheduledOwner.read, partition):
                    if found.setdefault(offset, value) != value:
                        self._report("I4", f"[{partition}] {offset} is {found[offset]!r} here and {value!r} there")
        return found

    def _report(self, invariant: str, text: str) -> None:
        self.violations.append(Violation(invariant, text))


def run_schedule(seed: int, stage: Stage, *, steps: int) -> OwnersSchedule:
    """One schedule on a stage, which is closed afterwards."""
    schedule = OwnersSchedule(seed, stage, steps=steps)
    try:
        schedule.run()
    finally:
        stage.close()
    return schedule


def mode_of(seed: int) -> str:
    """Where history lies in the schedule of this seed."""
    return random.Random(f"mode {seed}").choice(MODES)
