"""Sessions of the store in etcd: who counts what, and when a session ends for whom."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from forebay.errors import Closed, Invalid, Unavailable
from forebay.metadata import Put, SessionEnded
from forebay.metadata.etcd import EtcdMetadata
from forebay.metadata.etcd.leases import EtcdSession, Leases
from forebay.metadata.etcd.refusals import Refused
from forebay.metadata.etcd.wire import Request
from forebay.testing.contracts.metadata.calls import drain
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from tests.metadata.etcd.conftest import OpenStore
from tests.metadata.etcd.proxy import Proxy
from tests.support.etcd import Cluster
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]
LIFE_S = 3.0


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    with closing(Proxy(cluster.endpoints[0])) as proxy:
        yield proxy


def hold(act: str, cluster: Cluster, *, ttl_s: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.metadata.etcd.holder", act, ",".join(cluster.endpoints), str(ttl_s)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def hear(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def is_alive(child: subprocess.Popen[str]) -> str:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()
    return hear(child)


def test_a_session_that_is_not_renewed_ends_and_its_keys_vanish_in_one_revision(
    store: EtcdMetadata, open_store: OpenStore
) -> None:
    clock = ManualClock()
    session = leased(open_store(clock=clock), store)
    with store.watch("leased/") as watch:
        changes = drain(watch, 2)

    assert [(change.key, change.entry) for change in changes] == [("leased/1", None), ("leased/2", None)]
    assert changes[0].revision == changes[1].revision
    assert not store.session_alive(session.id)
    assert store.transaction([SessionEnded(session.id)], [Put("mine", b"")]).succeeded
    # Its holder would have known by its own clock, had it not stood still.
    assert session.alive()
    clock.advance(LIFE_S - 1.0)
    assert not session.alive()


def leased(holding: EtcdMetadata, store: EtcdMetadata) -> EtcdSession:
    """A short session that has two keys: a machine that was too slow to write them in its life begins again."""
    found: list[EtcdSession] = []

    def written() -> bool:
        session = holding.session(LIFE_S)
        puts = [Put(f"leased/{number}", b"", session=session.id) for number in (1, 2)]
        with suppress(Closed):
            store.transaction([], puts)
            found.append(session)
        return bool(found)

    until(written)
    return found[0]


@pytest.mark.slow
def test_a_process_that_was_paused_too_long_knows_it_at_once_and_one_that_runs_is_renewed(
    store: EtcdMetadata, cluster: Cluster
) -> None:
    # Both have more time to renew than a busy machine takes.
    with hold("hold", cluster, ttl_s=10) as paused, hold("fork", cluster, ttl_s=30) as running:
        assert hear(running) == "child 0", "a forked child must find its store closed and leave the session alone"
        one, other = hear(paused), hear(running)
        assert store.session_alive(one)
        assert is_alive(paused) == "True"

        paused.send_signal(signal.SIGSTOP)
        until(lambda: not store.session_alive(one))
        paused.send_signal(signal.SIGCONT)

        assert is_alive(paused) == "False"
        assert is_alive(running) == "True"
        assert store.session_alive(other)
        running.kill()
        until(lambda: not store.session_alive(other))
        assert store.get("leased") is None


def test_life_is_counted_from_the_sending_and_ends_before_the_lease(
    proxy: Proxy, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The thread wakes when the machine lets it, perhaps after the clock was put forward: here only the test renews.
    monkeypatch.setattr(Leases, "keep", lambda _leases: None)
    clock = ManualClock()
    store = open_store(proxy.endpoint, clock=clock)
    begun = clock.boottime()
    proxy.on_request = lambda: clock.advance(0.25)
    session = store.session(600.0)

    for _ in range(2):
        assert clock.boottime() > begun
        clock.advance(begun + 600.0 - 1.0 - clock.boottime() - 0.001)
        assert session.alive()
        clock.advance(0.002)
        assert not session.alive()

        # It was renewed late, but before etcd let it go: nobody else had its place meanwhile.
        begun = clock.boottime()
        inside(store).leases.renew_due()


@pytest.mark.parametrize("margin_s", [0.0, 1.0, 7.0, 9.5])
def test_a_session_is_due_again_twice_before_it_is_given_up_whatever_the_margin(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, margin_s: float
) -> None:
    monkeypatch.setattr(Leases, "keep", lambda _leases: None)
    clock = ManualClock()
    store = open_store(clock=clock)
    inside(store).leases.margin_s = margin_s
    session = store.session(10.0)

    clock.advance(2 * (session.due_at - clock.boottime()))

    assert session.alive()


def test_a_machine_that_slept_does_not_trust_its_session(open_store: OpenStore) -> None:
    clock = ManualClock()
    session = open_store(clock=clock).session(30.0)

    clock.jump(10**9)
    assert session.alive()
    clock.suspend(29.0)

    assert not session.alive()


def test_a_lease_taken_away_by_others_ends_the_session(store: EtcdMetadata, cluster: Cluster) -> None:
    session = store.session(600.0)
    cluster.call("lease/revoke", {"ID": str(int(session.id, 16))})
    session.due_at = 0.0
    inside(store).wake_renewing()

    until(lambda: not session.alive())

    session.close()
    assert not store.session_alive(session.id)


def test_a_session_that_etcd_cannot_be_told_of_ends_by_itself(
    proxy: Proxy, store: EtcdMetadata, open_store: OpenStore
) -> None:
    cut_off = open_store(proxy.endpoint)
    sessions = [cut_off.session(2.0), cut_off.session(2.0)]
    inside(cut_off).gateway.timeout_s = 0.2
    proxy.close()

    with pytest.raises(Unavailable, match=f"session {sessions[0].id} is renewed no more.*go within 2 s"):
        sessions[0].close()
    with pytest.raises(Unavailable, match=sessions[1].id):
        cut_off.close()

    assert [session.alive() for session in sessions] == [False, False]
    until(lambda: not any(store.session_alive(session.id) for session in sessions))


def test_a_session_that_etcd_could_not_be_told_of_is_ended_by_the_next_attempt(
    proxy: Proxy, store: EtcdMetadata, open_store: OpenStore
) -> None:
    def cut() -> None:
        raise OSError("cut off")

    cut_off = open_store(proxy.endpoint)
    session, gateway = cut_off.session(600.0), inside(cut_off).gateway
    on_request, proxy.on_request = proxy.on_request, cut
    patience_s, gateway.timeout_s = gateway.timeout_s, 0.2
    with pytest.raises(Unavailable, match="is renewed no more"):
        session.close()
    assert store.session_alive(session.id)
    proxy.on_request, gateway.timeout_s = on_request, patience_s

    session.close()

    assert not store.session_alive(session.id)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_renewal_that_failed_for_a_reason_nobody_foresaw_begins_again_with_the_next_session(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    with monkeypatch.context() as failing:
        failing.setattr(Leases, "renew_due", lambda _: 1 / 0)
        store.session(60.0)
        until(lambda: not _thread_of(store).is_alive())
    renewed: list[EtcdSession] = []

    def renew(_: Leases, session: EtcdSession) -> None:
        session.renewed(math.inf)
        renewed.append(session)

    monkeypatch.setattr(Leases, "renew", renew)

    session = store.session(60.0)
    session.due_at = 0.0
    inside(store).wake_renewing()

    until(lambda: session in renewed)


def test_a_process_that_slept_while_its_session_was_made_may_try_again(
    open_store: OpenStore, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    grant = inside(store).leases.grant

    def slow(ttl_s: int) -> tuple[int, float]:
        lease, granted_s = grant(ttl_s)
        cluster.call("lease/revoke", {"ID": str(lease)})
        return lease, granted_s

    with monkeypatch.context() as sleeping:
        sleeping.setattr(inside(store).leases, "grant", slow)
        with pytest.raises(Unavailable, match="ran out while it was being made: try again"):
            store.session(60.0)

    assert store.session(60.0).alive()


def test_a_session_that_etcd_refuses_leaves_no_lease(
    open_store: OpenStore, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    gateway = inside(store).gateway
    call, before = gateway.call, _leases_of(cluster)

    def refuse(path: str, request: Request, kind: type[object], *, repeatable: bool) -> object:
        if path == "/v3/kv/txn":
            raise Refused(8, "etcdserver: mvcc: database space exceeded")
        return call(path, request, kind, repeatable=repeatable)

    monkeypatch.setattr(gateway, "call", refuse)

    with pytest.raises(Unavailable, match="etcd is full"):
        store.session(600.0)

    assert _leases_of(cluster) <= before


def _leases_of(cluster: Cluster) -> set[str]:
    return {lease["ID"] for lease in cluster.call("lease/leases").get("leases", ())}


def _thread_of(store: EtcdMetadata) -> threading.Thread:
    thread = inside(store).renewing
    assert thread is not None
    return thread


def test_a_time_to_live_within_the_margin_is_refused(cluster: Cluster, open_store: OpenStore) -> None:
    store = open_store()
    inside(store).leases.margin_s = 5.0

    with pytest.raises(Invalid, match="ttl_s is 3.0, not above the margin of 5.0 s"):
        store.session(3.0)

    assert cluster.call("lease/leases").get("leases") is None
