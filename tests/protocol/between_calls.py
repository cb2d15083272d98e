"""Another process acts between any two calls that an operation makes to the metadata store, or the process dies there.

Each operation is run again and again, with the other process before its first call, before its second, and so on to
the last. Whatever the order: the operation does what it says or is refused, nothing acknowledged is lost or comes
back, and in the end the topic can be deleted so that nothing of it is left, and created again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import pyarrow as pa

from forebay import EARLIEST, UnknownTopic
from forebay.catalog import ShardCatalog, ShardKeys
from forebay.cleanup.collector import named_by
from forebay.cleanup.tables import TableObjects
from forebay.errors import (
    Closed,
    Conflict,
    ForebayError,
    Moved,
    Unavailable,
    UnknownLoad,
    UnknownRouter,
    UnknownSubscription,
)
from forebay.metadata import MemoryMetadata, MetadataStore
from forebay.routers.book import RouterBook
from forebay.routing import RouterRule
from forebay.service.tokens import NewToken, Tokens
from forebay.storage import Storage, Topic
from forebay.testing.checks.invariants import Violation
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.metadata import Fault, FaultyMetadata
from forebay.testing.simulated.others import SharedMetadata
from forebay.topics import TopicName, TopicSpec
from tests.support.environments.peers import Peer, Peers
from tests.support.environments.simulated import files_of

TOPIC: Final = "shop/orders"
OTHER: Final = "shop/other"
FAR: Final = "shop/far"
"""A topic that B owns."""
LOAD: Final = "load"
LOADED: Final = {0: b"loaded 0", 1: b"loaded 1"}
"""What the load brings, by partition."""
LEFT: Final = re.compile(r"/forebay/(topics|storage/topics|deleted|late|progress|subscriptions)/")
"""Keys that belong to a topic."""


@dataclass(slots=True)
class PeersScene:
    """Two peers, and what callers of theirs were told."""

    peers: Peers
    a: Peer
    b: Peer
    acknowledged: dict[tuple[str, int, int], bytes] = field(default_factory=dict)
    """By topic id, partition and offset, the value."""
    cursors: dict[tuple[str, str], int] = field(default_factory=dict)
    """By topic id and reader, how far a commit was acknowledged in partition 0."""
    ended: set[tuple[str, int, int]] = field(default_factory=set)
    """Records that a caller has deleted, by topic id, partition and offset."""
    gone: set[str] = field(default_factory=set)
    """Topics by id, `router NAME` and `subscription of ID`, whose deletion was acknowledged."""
    paused: bool = False
    """Router `r` was paused, as its caller was told."""
    token: NewToken | None = None
    tokens: dict[str, int | None] = field(default_factory=dict)
    """By token id, when it was revoked as the first caller was told; `None` while no caller was."""
    loads: set[str] = field(default_factory=set)
    """What callers were told has become of the load."""
    tabled: set[tuple[str, str]] = field(default_factory=set)
    """Objects that a table names, by topic id and key."""

    def append(self, topic: Topic, value: bytes, partition: int = 0) -> None:
        offset = topic.append(value, partition=partition)
        key = (topic.spec.topic_id, partition, offset)
        assert key not in self.acknowledged, "one offset for two records"
        self.acknowledged[key] = value

    def commit(self, log: Storage, reader: str, offset: int) -> None:
        topic = log.topic(TOPIC)
        stands = log.group(reader).commit(TOPIC, offset)
        key = (topic.spec.topic_id, reader)
        self.cursors[key] = max(stands, self.cursors.get(key, 0))

    def delete(self, log: Storage) -> None:
        spec = self.stored(log)
        log.delete_topic(TOPIC)
        self.gone.add(spec.topic_id)

    def stored(self, log: Storage) -> TopicSpec:
        """The topic by what is stored, not by what the process may remember for a second."""
        return inside(log).definitions.look(TopicName.parse(TOPIC)).spec

    def unsubscribe(self, log: Storage) -> None:
        subscription = log.topic(TOPIC).subscription("s")
        subscription.delete()
        self.gone.add(f"subscription of {log.topic(TOPIC).spec.topic_id}")

    def drop_router(self, process: Peer) -> None:
        router = router_book(process).delete("r")
        self.gone.add("router r")
        if router is not None:
            router_book(process).forget_cursors(router)

    def pause_router(self, process: Peer) -> None:
        router_book(process).pause("r")
        self.paused = True

    def revoke(self, process: Peer) -> None:
        assert self.token is not None
        self.peers.clock.advance(1)
        revoked = self.tokens_of(process).revoke(self.token.token.token_id)
        assert self.tokens[revoked.token_id] in (None, revoked.revoked_at), "a token was revoked at two times"
        self.tokens[revoked.token_id] = revoked.revoked_at

    def create_token(self, process: Peer) -> NewToken:
        made = self.tokens_of(process).create("anna", scopes=["read"], prefixes=["*"])
        self.tokens[made.token.token_id] = None
        return made

    def tokens_of(self, process: Peer) -> Tokens:
        return Tokens(process.metadata, self.peers.settings.metadata.prefix, self.peers.clock)

    def attach(self, log: Storage) -> None:
        self._told(log.loads_of(TOPIC).attach(LOAD).status)

    def give_up_load(self, log: Storage) -> None:
        self._told(log.loads_of(TOPIC).abandon(LOAD).status)

    def _told(self, status: str) -> None:
        if status != "offered":
            self.loads.add(status)

    def register(self, process: Peer) -> None:
        """Have a table name what history names, as a registration does: it writes that down, and looks again."""
        log, settings = process.log, self.peers.settings
        spec = self.stored(log)
        keys = ShardKeys(spec.namespace, spec.topic, 0, settings.metadata.prefix)
        catalog = ShardCatalog(process.metadata, keys, spec.topic_id, clock=self.peers.clock)
        named, store = named_by(catalog), inside(log).places.store
        assert store is not None
        tables = TableObjects(
            process.metadata,
            settings.metadata.prefix,
            spec.namespace,
            spec.topic,
            spec.topic_id,
            clock=self.peers.clock,
        )
        tables.put(named, store)
        if named <= named_by(catalog):
            self.tabled |= {(spec.topic_id, key) for key in named}

    def expire(self, log: Storage) -> None:
        """Delete the first records, and collect what nothing needs any more once every grace is over."""
        topic = log.topic(TOPIC)
        self.ended |= {(topic.spec.topic_id, 0, offset) for offset in range(3)}
        topic.delete_before(3, partition=0)
        log.export_topic(TOPIC)
        log.run_retention(TOPIC)
        self.peers.clock.advance(self.peers.settings.export.orphan_grace_s + 1)
        inside(log).collect(topic)


def prepared(scene: PeersScene) -> None:
    """A topic that A owns, with history and a tail, a subscription, a reader and a router away from it."""
    topic = scene.a.log.create_topic(TOPIC, partitions=2)
    scene.a.log.create_topic(OTHER)
    for value in (b"0", b"1", b"2"):
        scene.append(topic, value)
    scene.a.log.export_topic(TOPIC)
    topic.subscribe("s", start=EARLIEST)
    scene.commit(scene.a.log, "g", 1)
    scene.append(topic, b"3")
    router_book(scene.a).create("r", [TOPIC], OTHER, RouterRule(), start=EARLIEST)
    scene.token = scene.create_token(scene.a)
    _offer(scene.a.log)
    scene.append(scene.b.log.create_topic(FAR), b"far")


def _offer(log: Storage, load_id: str = LOAD) -> None:
    """A load that brings each partition one record."""
    loads = log.loads_of(TOPIC)
    schema = pa.schema([("value", pa.binary())])
    segments = [
        segment
        for partition, value in LOADED.items()
        for segment in loads.stage(
            load_id,
            pa.RecordBatch.from_pydict({"value": [value if load_id == LOAD else b"other"]}, schema=schema),
            partition,
        )
    ]
    loads.offer(load_id, segments)


def router_book(process: Peer) -> RouterBook:
    return RouterBook(process.log, ManualClock(seed=3))


Act = Callable[[PeersScene], None]


def _delete(scene: PeersScene) -> None:
    scene.delete(scene.b.log)


def _recreate(scene: PeersScene) -> None:
    scene.delete(scene.b.log)
    topic = scene.b.log.create_topic(TOPIC, partitions=2)
    scene.append(topic, b"new")


def _alter(scene: PeersScene) -> None:
    partitions = scene.b.log.topic(TOPIC).partitions
    scene.b.log.alter_topic(TOPIC, partitions=partitions + 1, allow_loss=True)


def _commit(scene: PeersScene) -> None:
    scene.commit(scene.b.log, "g", 3)


def _clean_up(scene: PeersScene) -> None:
    inside(scene.b.log).clear_moved()


OTHERS: Final[dict[str, Act]] = {
    "deletes": _delete,
    "deletes and creates again": _recreate,
    "alters": _alter,
    "commits": _commit,
    "unsubscribes": lambda scene: scene.unsubscribe(scene.b.log),
    "drops the router": lambda scene: scene.drop_router(scene.b),
    "pauses the router": lambda scene: scene.pause_router(scene.b),
    "cleans up": _clean_up,
    "attaches": lambda scene: scene.attach(scene.b.log),
    "gives the load up": lambda scene: scene.give_up_load(scene.b.log),
    "revokes": lambda scene: scene.revoke(scene.b),
    "registers": lambda scene: scene.register(scene.b),
    "stops what was deleted": lambda scene: inside(scene.b.log).end_deleted(),
}


def _flush_cached(scene: PeersScene) -> None:
    log = scene.a.log
    topic = log.topic(TOPIC)
    log.group("g").commit(TOPIC, 2, ack="cached")
    log.group("h").commit(TOPIC, 1, ack="cached")
    inside(log).flush_cursors()
    scene.cursors[topic.spec.topic_id, "h"] = 1


def _seal_and_take_back(scene: PeersScene) -> None:
    scene.a.log.seal_topic(TOPIC)
    scene.a.log.unseal_topic(TOPIC)


DONE_BEFORE: Final[dict[str, tuple[type[ForebayError], ...]]] = {
    "delete": (UnknownTopic,),
    "delete what another owns": (UnknownTopic,),
    "delete subscription": (UnknownSubscription,),
    "create router": (Conflict,),
    "delete router": (UnknownRouter,),
    "seal": (Moved,),
}
"""How an operation is refused that was done before the process died."""

OPERATIONS: Final[dict[str, Act]] = {
    "append": lambda scene: scene.append(scene.a.log.topic(TOPIC), b"2", 1),
    "export": lambda scene: scene.a.log.export_topic(TOPIC),
    "seal": lambda scene: _ignored(scene.a.log.seal_topic(TOPIC)),
    "take back": _seal_and_take_back,
    "create": lambda scene: _ignored(scene.a.log.create_topic("shop/new", partitions=2, exist_ok=True)),
    "alter": lambda scene: _ignored(scene.a.log.alter_topic(TOPIC, partitions=4, allow_loss=True)),
    "delete": lambda scene: scene.delete(scene.a.log),
    "delete what another owns": lambda scene: scene.a.log.delete_topic(FAR),
    "subscribe": lambda scene: _ignored(scene.a.log.topic(TOPIC).subscribe("t", start=EARLIEST)),
    "alter subscription": lambda scene: _ignored(
        scene.a.log.topic(TOPIC).subscription("s").alter(ack_timeout_ms=9_000)
    ),
    "delete subscription": lambda scene: scene.unsubscribe(scene.a.log),
    "create router": lambda scene: _ignored(router_book(scene.a).create("q", [TOPIC], OTHER, RouterRule())),
    "alter router": lambda scene: _ignored(router_book(scene.a).alter("r", RouterRule(tags=("x",)))),
    "delete router": lambda scene: scene.drop_router(scene.a),
    "commit": lambda scene: scene.commit(scene.a.log, "g", 2),
    "flush": _flush_cached,
    "clean up": lambda scene: inside(scene.a.log).clear_moved(),
    "collect": lambda scene: inside(scene.a.log).collect_directory(),
    "retain": lambda scene: _ignored(scene.a.log.run_retention(TOPIC)),
    "expire and collect": lambda scene: scene.expire(scene.a.log),
    "offer": lambda scene: _offer(scene.a.log, "another"),
    "attach": lambda scene: scene.attach(scene.a.log),
    "step of loads": lambda scene: scene.a.log.loads.step(),
    "give up": lambda scene: scene.give_up_load(scene.a.log),
    "create token": lambda scene: _ignored(scene.create_token(scene.a)),
    "revoke": lambda scene: scene.revoke(scene.a),
    "register": lambda scene: scene.register(scene.a),
}


def _ignored(made: object) -> None:
    """What an operation returns is not looked at."""


def new_scene(mode: str, metadata: Callable[[], MetadataStore] | None = None) -> PeersScene:
    """Two processes in the midst of life; `metadata` opens their handles on the store, if it is not a plain one."""
    peers = Peers(mode=mode, metadata=metadata)
    scene = PeersScene(peers, peers.open("A"), peers.open("B"))
    prepared(scene)
    return scene


def outcome(act: Callable[[], None]) -> ForebayError | None:
    """How it was refused, if it was."""
    try:
        act()
    except ForebayError as error:
        return error
    return None


def judge(scene: PeersScene) -> None:
    """What holds whatever came in between: in the end a new process of each directory finds it in order."""
    peers = scene.peers
    for process in (scene.a, scene.b):
        if process in peers.opened:
            peers.end(process)
    a, b = peers.open("A"), peers.open("B")
    _judge_load(scene, a, b)
    _judge_kept(scene, a, b)
    _judge_gone(scene, b)
    _judge_tokens(scene, b)
    for spec in b.log.topics():
        b.log.delete_topic(spec.name)
    for _ in range(2):
        for process in (a, b):
            peers.settle(process)
    left = [key for key in peers.stored() if LEFT.match(key)]
    assert left == [], "nothing is left of a topic that was deleted"
    assert peers.shard_files() == []
    again = b.log.create_topic(TOPIC, partitions=2)
    again.append(b"again")
    assert [record.value for record in again.read()] == [b"again"]
    assert again.subscriptions() == []
    assert b.log.group("g").fetch(TOPIC) is None
    peers.close()


def _judge_kept(scene: PeersScene, a: Peer, b: Peer) -> None:
    """What was acknowledged of the topic that is there now is there, at its offset, where it is owned."""
    try:
        spec = b.log.topic(TOPIC).spec
    except UnknownTopic:
        return
    for partition in range(spec.partitions):
        wanted = {
            offset: value
            for (topic_id, number, offset), value in scene.acknowledged.items()
            if (topic_id, number) == (spec.topic_id, partition) and (topic_id, number, offset) not in scene.ended
        }
        found = _read_where_owned([a, b], partition)
        missing = {offset: value for offset, value in wanted.items() if found.get(offset) != value}
        assert missing == {}, f"acknowledged, and not to be read: {missing}"
    for (topic_id, reader), offset in scene.cursors.items():
        if topic_id == spec.topic_id:
            stands = b.log.group(reader).fetch(TOPIC)
            assert stands is not None and stands >= offset, "a cursor went back"
    topic = next(process for process in (a, b) if _can_append(process)).log.topic(TOPIC)
    assert topic.spec.topic_id == spec.topic_id


def _judge_load(scene: PeersScene, a: Peer, b: Peer) -> None:
    """All of the load is there or none, as callers were told; what was begun is finished by the owner's next steps."""
    for process in (a, b):
        process.log.loads.step()
    try:
        status = a.log.loads_of(TOPIC).get(LOAD).status
        if status == "offered":
            status = a.log.loads_of(TOPIC).abandon(LOAD).status
    except UnknownTopic:
        return
    except UnknownLoad:
        status = "abandoned"
        scene.loads.discard("committed")  # into a topic of this name that is gone
    assert scene.loads <= {status}, f"the load is {status}, callers were told {scene.loads}"
    for partition, value in LOADED.items():
        found = list(_read_where_owned([a, b], partition).values()).count(value)
        assert found == (status == "committed"), f"the load is {status}, and [{partition}] has {found} of its record"


def _judge_gone(scene: PeersScene, b: Peer) -> None:
    """What was deleted, by what a caller was told, does not come back; what was paused is."""
    for spec in b.log.topics():
        assert spec.topic_id not in scene.gone, "a topic came back"
        if spec.name == TopicName.parse(TOPIC) and f"subscription of {spec.topic_id}" in scene.gone:
            names = {subscription.name for subscription in b.log.topic(TOPIC).subscriptions()}
            assert "s" not in names, "a subscription came back"
        kept = {f"/store/{key}" for topic_id, key in scene.tabled if topic_id == spec.topic_id}
        assert kept <= set(files_of(scene.peers.disk)), "an object that a table names was removed"
    routers = {router.name: router for router in router_book(b).all()}
    assert not ("router r" in scene.gone and "r" in routers), "a router came back"
    if "r" in routers:
        assert routers["r"].is_paused >= scene.paused, "a router goes on that was paused"


def _judge_tokens(scene: PeersScene, b: Peer) -> None:
    """Each token that was made is listed, and was revoked when its caller was told."""
    found = {token.token_id: token.revoked_at for token in scene.tokens_of(b).all()}
    for token_id, revoked_at in scene.tokens.items():
        assert token_id in found, "a token is gone"
        assert revoked_at in (None, found[token_id]), f"revoked at {revoked_at}, and listed as at {found[token_id]}"


def _read_where_owned(peers: list[Peer], partition: int) -> dict[int, bytes | None]:
    for process in peers:
        found: dict[int, bytes | None] = {}
        topic = process.log.topic(TOPIC)
        try:
            for record in topic.read(partition=partition, on_gap=lambda place, gap: None):
                found[record.offset] = record.value
        except (Moved, Unavailable, Conflict, Closed):
            continue
        state = process.log.recorded(TOPIC)[partition].state
        if state is None or state.holder in (None, process.log.directory_id):
            return found
    return found


def _can_append(process: Peer) -> bool:
    """Whether the topic takes appends in this process."""
    return outcome(lambda: _ignored(process.log.topic(TOPIC).append(b"end", partition=0))) is None


def calls_of(operation: str, mode: str) -> range:
    """The calls that an operation makes while it is alone."""
    scene = new_scene(mode)
    before = scene.a.metadata.calls
    OPERATIONS[operation](scene)
    made = scene.a.metadata.calls - before
    scene.peers.close()
    return range(made)


def meet(operation: str, other: str, call: int, mode: str) -> None:
    """One case: the other process acts before that call of the operation; in the end everything is judged."""
    scene = new_scene(mode)
    scene.a.metadata.before(call, partial(outcome, partial(OTHERS[other], scene)))
    outcome(partial(OPERATIONS[operation], scene))
    judge(scene)


def arrive_late(operation: str, other: str, number: int, mode: str) -> bool:
    """One case: a transaction of the operation times out, another process acts, then that transaction lands.

    False if the operation has fewer transactions.
    """
    store = MemoryMetadata()
    scene = new_scene(mode, lambda: FaultyMetadata(SharedMetadata(store)))
    faulty = scene.a.metadata.inner
    assert isinstance(faulty, FaultyMetadata)
    faulty.inject(Fault.TIME_OUT, after=number)
    outcome(partial(OPERATIONS[operation], scene))
    faulty.heal()
    outcome(partial(OTHERS[other], scene))
    landed = faulty.land()
    judge(scene)
    return bool(landed)


def broken_between(operation: str, other: str, mode: str = "shared_fs") -> Iterator[Violation]:
    """What breaks if the other process acts between any two calls of an operation."""
    for call in calls_of(operation, mode):
        try:
            meet(operation, other, call, mode)
        except AssertionError as error:
            yield Violation("between", f"{other} before call {call} of {operation}: {error}")
