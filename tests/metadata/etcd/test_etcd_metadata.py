"""What only the store in etcd can get wrong: session keys among others, pages, compaction, endings."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import AbstractContextManager

import pytest

from forebay.errors import Closed, Invalid
from forebay.metadata import (
    OPERATIONS_MAX,
    Absent,
    Compacted,
    Compare,
    Delete,
    DeleteRange,
    Exists,
    Operation,
    Put,
    SessionEnded,
)
from forebay.metadata.etcd import EtcdMetadata, store, watch
from forebay.metadata.etcd.gateway import Gateway, ReplyStream
from forebay.metadata.etcd.wire import Request
from forebay.testing.contracts.metadata.calls import drain, keys_under, put
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from tests.metadata.etcd.conftest import OpenStore
from tests.support.etcd import Cluster, text
from tests.support.waiting import PATIENCE, until


def test_session_keys_are_seen_and_touched_by_nobody(store: EtcdMetadata, cluster: Cluster) -> None:
    session = store.session(30.0)
    put(store, "/forebay/a", "/forebay/sessions", "/forebay/sessionsx", "/forebay/z", "/g")
    stored = cluster.call("kv/range", {"key": text(f"/forebay/sessions/{session.id}")})["kvs"]
    assert stored[0]["lease"] == str(int(session.id, 16))

    everything = ["/forebay/a", "/forebay/sessions", "/forebay/sessionsx", "/forebay/z", "/g"]
    assert keys_under(store, "") == everything
    assert keys_under(store, "/forebay/") == everything[:-1]
    assert keys_under(store, "/forebay/s") == everything[1:3]
    assert [entry.key for entry in store.range("", start_after="/forebay/a", limit=2)] == everything[1:3]
    assert [entry.key for entry in store.range("", start_after="/forebay/sessions/x")] == everything[2:]
    with store.watch("/forebay/") as watch:
        other = store.session(30.0)
        store.transaction([], [DeleteRange("/forebay/"), DeleteRange(""), DeleteRange("/forebay/se"), Delete("/g")])
        assert [change.key for change in drain(watch, 4)] == everything[:-1]
    assert keys_under(store, "") == []
    assert store.session_alive(session.id)
    assert store.session_alive(other.id)
    assert not store.transaction([SessionEnded(session.id)], []).succeeded


@pytest.mark.parametrize("key", ["/forebay/sessions/", "/forebay/sessions/0000000000000001"])
def test_session_keys_cannot_be_named(store: EtcdMetadata, key: str) -> None:
    for call in (
        lambda: store.get(key),
        lambda: store.range(key),
        lambda: store.watch(key),
        lambda: store.transaction([Absent(key)], []),
        lambda: store.transaction([], [Put(key, b"")]),
        lambda: store.transaction([], [Delete(key)]),
        lambda: store.transaction([], [DeleteRange(key)]),
    ):
        with pytest.raises(Invalid, match="which the store keeps for its sessions"):
            call()


def test_the_largest_transaction_fits_into_etcds_own_limit(store: EtcdMetadata) -> None:
    compares: list[Compare] = [Absent(f"a/{number}") for number in range(OPERATIONS_MAX)]
    operations: list[Operation] = [Delete(f"a/{number}") for number in range(OPERATIONS_MAX - 1)]

    assert store.transaction(compares, [*operations, DeleteRange("")]).succeeded


def test_a_long_range_is_one_state_however_many_pages_it_takes(
    store: EtcdMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.metadata.etcd.store.PAGE_KEYS_MAX", 7)
    keys = [f"p/{number:03}" for number in range(100)]
    put(store, *keys, value=b"0")
    stop = threading.Event()

    def rewrite() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            put(store, *keys, value=b"%d" % number)

    thread = threading.Thread(target=rewrite)
    thread.start()
    ranges = [store.range("p/") for _ in range(10)] + [store.range("", limit=30)]
    stop.set()
    thread.join()

    for found in ranges:
        assert [entry.key for entry in found] == keys[: len(found)]
        assert len({entry.value for entry in found}) == 1
    assert len(ranges[-1]) == 30


def test_a_range_begins_again_when_its_state_is_compacted(
    store: EtcdMetadata, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.metadata.etcd.store.PAGE_KEYS_MAX", 2)
    put(store, "a", "b", "c")
    call = inside(store).gateway.call
    compactions = iter(range(2))

    def compacting(path: str, request: dict[str, object], *arguments: object, **options: object) -> object:
        if request.get("revision") not in (None, "0") and next(compactions, None) is not None:
            put(store, "other")
            cluster.compact()
        return call(path, request, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(inside(store).gateway, "call", compacting)

    assert keys_under(store, "") == ["a", "b", "c", "other"]


def test_a_deletion_at_the_very_revision_of_a_compaction_is_not_skipped(store: EtcdMetadata, cluster: Cluster) -> None:
    """etcd before 3.5.16 lets a watch begin at the compacted revision, whose deletions it has forgotten."""
    put(store, "w/1")
    deletion = store.transaction([], [Delete("w/1")]).revision
    cluster.compact()

    with store.watch("w/", from_revision=deletion) as watch, pytest.raises(Compacted):
        watch.poll(0.0)
    with store.watch("w/", from_revision=deletion + 1) as watch:
        put(store, "w/2")
        assert [change.key for change in drain(watch, 1)] == ["w/2"]


def test_nor_is_it_when_the_compaction_comes_between_the_look_and_the_stream(
    store: EtcdMetadata, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "w/1")
    deletion = store.transaction([], [Delete("w/1")]).revision
    cluster.compact()
    monkeypatch.setattr(watch.EtcdWatch, "check_kept", lambda _: None)

    with store.watch("w/", from_revision=deletion) as late, pytest.raises(Compacted):
        late.poll(30.0)


def test_a_watch_that_loses_its_place_while_cut_off_says_so_for_ever(
    store: EtcdMetadata, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.metadata.etcd.watch.IDLE_S", 0.2)
    with store.watch("w/") as watch:
        assert watch.poll(0.0) == []
        put(store, "other")
        cluster.compact()

        def lost() -> bool:
            try:
                watch.poll(0.1)
            except Compacted:
                return True
            return False

        until(lost)
        with pytest.raises(Compacted, match="list again"):
            watch.poll(0.0)


def test_silence_does_not_end_a_watch(store: EtcdMetadata, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that was silent too long ends, and the watch goes on with the next: here after three of them."""
    stream, begun = Gateway.stream, list[str]()

    def impatient(gateway: Gateway, path: str, request: Request, idle_s: float) -> AbstractContextManager[ReplyStream]:
        begun.append(path)
        return stream(gateway, path, request, min(idle_s, 0.05))

    monkeypatch.setattr(Gateway, "stream", impatient)
    with store.watch("w/") as watch:
        assert watch.poll(0.0) == []
        until(lambda: begun.count("/v3/watch") > 3)
        put(store, "w/1")
        assert [change.key for change in drain(watch, 1)] == ["w/1"]


def test_a_watch_that_nobody_polls_does_not_fill_the_memory(
    store: EtcdMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "HISTORY_CHANGES_MAX", 10)
    with store.watch("w/") as slow:
        put(store, "w/first")
        drain(slow, 1)
        # One revision at a time, for a reply of etcd may hold many: then it is full, and takes no more.
        for number in range(5):
            put(store, f"w/{number}a", f"w/{number}b")
            until(lambda: inside(store).buffered(slow) == 2 * (number + 1))  # noqa: B023 - waited for at once
        for number in range(5, 30):
            put(store, f"w/{number}a", f"w/{number}b")

        assert inside(store).buffered(slow) == 10
        assert len(drain(slow, 60)) == 60


def test_closing_meets_a_watch_that_is_just_beginning(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of a watch was once known before it ran, and closing could not wait for it."""
    store = open_store()
    with store.watch("w/") as watch:
        start = threading.Thread.start

        def closing(thread: threading.Thread) -> None:
            if thread.name == "forebay-watch":
                closer = threading.Thread(target=store.close)
                start(closer)
                closers.append(closer)
            start(thread)

        closers: list[threading.Thread] = []
        monkeypatch.setattr(threading.Thread, "start", closing)

        with pytest.raises(Closed):
            watch.poll(30.0)
        closers[0].join(PATIENCE)
    assert not closers[0].is_alive()


def test_what_names_no_session_owns_nothing(store: EtcdMetadata) -> None:
    for session in ("nobody", "0" * 16, "f" * 16, "1" * 17):
        with pytest.raises(Closed, match=f"session {session} has ended"):
            store.transaction([], [Put("a", b"", session=session)])
        assert not store.transaction([Exists("no")], [Put("a", b"", session=session)]).succeeded
    assert store.range("") == []


def test_a_clock_that_stands_still_ends_a_wait_all_the_same(open_store: OpenStore) -> None:
    with open_store(clock=ManualClock()).watch("w/") as watch:
        assert watch.poll(0.05) == []


def test_an_old_etcd_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    store.warn_of_version.cache_clear()
    for version, warned in (
        ("3.5.2", True),
        ("3.5.3", False),
        ("3.10.0", False),
        ("not a number", False),
        (None, False),
    ):
        caplog.clear()
        store.warn_of_version(version)
        assert ("use 3.5.3 or newer" in caplog.text) is warned
        caplog.clear()
        store.warn_of_version(version)
        assert caplog.text == ""


def test_httpx_is_loaded_only_by_who_asks_for_etcd_and_missed_by_name() -> None:
    code = """
import sys
import forebay, forebay.metadata, forebay.storage
assert "httpx" not in sys.modules
sys.modules["httpx"] = None
try:
    import forebay.metadata.etcd
except forebay.Unsupported as error:
    print(error)
"""

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert said == 'metadata.backend "etcd" needs httpx: install "forebay[etcd]"\n'
