"""The store in etcd when members die, hang, lose their majority, or their answers are lost."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from forebay.clock import SystemClock
from forebay.errors import Indeterminate, Unavailable
from forebay.metadata import Absent, Change, Put, RevisionIs, SessionEnded, Watch
from forebay.metadata.etcd import EtcdMetadata
from forebay.metadata.etcd.leases import EtcdSession
from forebay.testing.inside import inside
from tests.ledger import Ledger
from tests.metadata.etcd.conftest import OpenStore
from tests.metadata.etcd.proxy import Proxy
from tests.support.etcd import Cluster
from tests.support.ports import free_ports
from tests.support.waiting import PATIENCE, until


@dataclass
class Writer:
    """Writes keys that nobody else writes and takes part in one counter, for as long as it is asked to."""

    name: str
    store: EtcdMetadata
    stop: threading.Event
    acked: dict[str, int] = field(default_factory=dict)
    """Key to revision."""
    refused: set[str] = field(default_factory=set)
    open: set[str] = field(default_factory=set)
    won: list[int] = field(default_factory=list)
    maybe_won: int = 0

    def run(self) -> None:
        number = 0
        while not self.stop.is_set():
            number += 1
            key = f"k/{self.name}/{number:05}"
            try:
                outcome = self.store.transaction([Absent(key)], [Put(key, key.encode())])
                assert outcome.succeeded
                self.acked[key] = outcome.revision
            except Unavailable:
                self.refused.add(key)
            except Indeterminate:
                self.open.add(key)
            self.add_one()

    def add_one(self) -> None:
        with contextlib.suppress(Unavailable):
            entry = self.store.get("counter")
            revision, value = (0, 0) if entry is None else (entry.mod_revision, int(entry.value))
            try:
                if self.store.transaction(
                    [RevisionIs("counter", revision)], [Put("counter", b"%d" % (value + 1))]
                ).succeeded:
                    self.won.append(value + 1)
            except Indeterminate:
                self.maybe_won += 1


def gather(watch: Watch, enough: Callable[[], bool], changes: list[Change]) -> None:
    """Add what the watch gives, whatever it meets, until there is enough."""

    def gathered() -> bool:
        with contextlib.suppress(Unavailable):
            changes.extend(watch.poll(0.2))
        return enough()

    until(gathered)


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def renew_now(store: EtcdMetadata, session: EtcdSession) -> None:
    """Return once a member of etcd has confirmed the session in answer to a renewal that is sent from now on."""
    clock = SystemClock()
    session.due_at = 0.0
    inside(store).wake_renewing()
    # A renewal that fails is due again at once; one that is answered is due after a third of the session's life.
    until(lambda: session.due_at > clock.boottime() + session.ttl_s / 4)


@pytest.fixture
def proxies(cluster: Cluster) -> Iterator[list[Proxy]]:
    """A wire to every member."""
    made = [Proxy(endpoint) for endpoint in cluster.endpoints]
    yield made
    for proxy in made:
        proxy.close()


@pytest.mark.slow
def test_kill_9_of_the_leader_in_mid_traffic_loses_and_repeats_nothing(
    cluster: Cluster, open_store: OpenStore, ledger: Ledger
) -> None:
    holding = open_store()
    session = holding.session(600.0)  # longer than the test takes: what it shows is that others renew it
    leader = cluster.leader()
    rotated = cluster.endpoints[leader:] + cluster.endpoints[:leader]
    stop = threading.Event()
    writers = [Writer(name, open_store(*rotated[turn:], *rotated[:turn]), stop) for turn, name in enumerate("abc")]
    threads = [threading.Thread(target=writer.run) for writer in writers]
    for thread in threads:
        thread.start()
    until(lambda: all(len(writer.acked) >= 30 for writer in writers))

    cluster.members[leader].kill()
    ledger.count("kills", what="etcd leader")
    at_kill = [len(writer.acked) for writer in writers]
    until(lambda: all(len(w.acked) >= before + 30 for w, before in zip(writers, at_kill, strict=True)))
    stop.set()
    join(threads)
    renew_now(holding, session)
    cluster.start_all()

    store = open_store()
    present = {entry.key: entry for entry in store.range("k/")}
    for writer in writers:
        for key, revision in writer.acked.items():
            assert (present[key].create_revision, present[key].mod_revision) == (revision, revision)
        assert not writer.refused & present.keys(), "unavailable means that nothing was done"
    claimed = {key for writer in writers for key in (*writer.acked, *writer.open)}
    assert present.keys() <= claimed
    winners = Counter(value for writer in writers for value in writer.won)
    counter = store.get("counter")
    assert counter is not None
    assert max(winners.values()) == 1, "two won the same comparison"
    assert len(winners) <= int(counter.value) <= len(winners) + sum(writer.maybe_won for writer in writers)
    assert session.alive()
    assert not store.transaction([SessionEnded(session.id)], []).succeeded
    ledger.count("acknowledged transactions", n=len(winners) + sum(len(writer.acked) for writer in writers))


@pytest.mark.slow
def test_a_watch_across_the_death_of_its_member_misses_and_repeats_nothing(
    cluster: Cluster, open_store: OpenStore
) -> None:
    leader = cluster.leader()
    rotated = cluster.endpoints[leader:] + cluster.endpoints[:leader]
    watching, writing = open_store(*rotated), open_store(*rotated[1:])
    written: list[tuple[int, str]] = []
    seen: list[Change] = []
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            with contextlib.suppress(Unavailable, Indeterminate):
                key = f"w/{len(written):05}"
                written.append((writing.transaction([], [Put(key, b"")]).revision, key))

    thread = threading.Thread(target=write)
    with watching.watch("w/") as watch:
        start = watch.revision + 1
        thread.start()
        gather(watch, lambda: len(seen) >= 30, seen)
        cluster.members[leader].kill()
        goal = len(seen) + 60
        gather(watch, lambda: len(seen) >= goal, seen)
        stop.set()
        join([thread])
        gather(watch, lambda: watch.revision >= written[-1][0], seen)
        cluster.start_all()

    every: list[Change] = []
    with open_store().watch("w/", from_revision=start) as again:
        gather(again, lambda: again.revision >= watch.revision, every)
    assert seen == every
    assert [change.revision for change in seen] == sorted({change.revision for change in seen})
    assert set(written) <= {(change.revision, change.key) for change in seen}


def test_a_member_that_hangs_costs_time_and_not_the_answer(cluster: Cluster, open_store: OpenStore) -> None:
    key = "hangs"  # of this test alone: what another test left in doubt may still come
    hanging = (cluster.leader() + 1) % 3
    rotated = cluster.endpoints[hanging:] + cluster.endpoints[:hanging]
    reader, writer = open_store(*rotated, request_timeout_ms=4_000), open_store(*rotated, request_timeout_ms=4_000)
    revision = writer.transaction([], [Put(key, b"1")]).revision

    cluster.members[hanging].signal(signal.SIGSTOP)
    entry = reader.get(key)
    with pytest.raises(Indeterminate, match="its answer is lost .*read to find out"):
        writer.transaction([RevisionIs(key, revision)], [Put(key, b"2")])
    again = writer.transaction([RevisionIs(key, revision)], [Put(key, b"3")])
    cluster.members[hanging].signal(signal.SIGCONT)

    assert entry is not None
    assert entry.value == b"1"
    assert again.succeeded
    until(cluster.is_healthy)
    # The one that hung comes too late for its comparison, whether or not it comes.
    settled = open_store(rotated[0]).get(key)
    assert settled is not None
    assert (settled.value, settled.mod_revision) == (b"3", again.revision)


@pytest.mark.slow
def test_without_a_majority_nothing_is_done_and_nobody_is_left_in_doubt(
    cluster: Cluster, open_store: OpenStore
) -> None:
    store = open_store(request_timeout_ms=4_000)
    revision = store.transaction([], [Put("a", b"")]).revision
    for member in cluster.members[:2]:
        member.kill()

    def says_so() -> bool:
        """Once the member that is left has noticed."""
        try:
            store.get("a")
        except Unavailable as error:
            return "no leader" in str(error)
        return False

    until(says_so)
    with pytest.raises(Unavailable, match="no leader.*nothing was done.*majority"):
        store.transaction([], [Put("a", b"")])

    cluster.start_all()
    assert store.revision() == revision


def test_an_answer_lost_on_the_way_leaves_a_transaction_open(proxies: list[Proxy], open_store: OpenStore) -> None:
    store = open_store(proxies[0].endpoint, proxies[1].endpoint)
    before = store.revision()
    proxies[0].lose_answers = True

    with pytest.raises(Indeterminate, match="read to find out"):
        store.transaction([Absent("a")], [Put("a", b"1")])

    assert store.revision() == before + 1
    assert store.get("a") is not None
    assert store.transaction([Absent("b")], [Put("b", b"1")]).succeeded


def test_what_is_safe_to_repeat_is_asked_of_the_next_member(proxies: list[Proxy], open_store: OpenStore) -> None:
    store = open_store(*(proxy.endpoint for proxy in proxies))
    store.transaction([], [Put("a", b"1")])
    proxies[0].lose_answers = True

    assert store.get("a") is not None
    proxies[0].lose_answers, proxies[1].lose_answers = False, True
    session = store.session(30.0)
    assert store.session_alive(session.id)
    proxies[1].lose_answers, proxies[2].lose_answers = False, True
    session.close()

    assert not store.session_alive(session.id)


def test_a_transaction_that_was_never_sent_goes_to_the_next_member(cluster: Cluster, open_store: OpenStore) -> None:
    dead = f"http://127.0.0.1:{free_ports(1)[0]}"
    store = open_store(dead, cluster.endpoints[0])

    assert store.transaction([Absent("a")], [Put("a", b"")]).succeeded


def test_with_all_members_down_every_endpoint_is_named_and_what_to_do(open_store: OpenStore) -> None:
    endpoints = [f"http://127.0.0.1:{port}" for port in free_ports(2)]

    with pytest.raises(Unavailable) as refusal:
        open_store(*endpoints, request_timeout_ms=200)

    assert all(f"{endpoint} ([Errno 111] Connection refused)" in str(refusal.value) for endpoint in endpoints)
    assert "nothing was done: check metadata.endpoints and that a majority" in str(refusal.value)


def test_a_watch_without_members_says_so_and_goes_on_later(proxies: list[Proxy], open_store: OpenStore) -> None:
    store = open_store(proxies[0].endpoint, request_timeout_ms=3_000)
    with store.watch("w/") as watch:
        assert watch.poll(0.0) == []
        proxies[0].lose_answers = True
        open_store().transaction([], [Put("w/1", b"")])

        def troubled() -> bool:
            try:
                watch.poll(0.1)
            except Unavailable:
                return True
            return False

        until(troubled)
        proxies[0].lose_answers = False
        found: list[Change] = []
        gather(watch, lambda: bool(found), found)
    assert [change.key for change in found] == ["w/1"]
