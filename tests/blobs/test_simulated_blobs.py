"""The simulated store fails as asked, and only so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forebay.blobs import BlobChanged, Denied
from forebay.errors import ForebayError, Indeterminate, Unavailable, Unsupported
from forebay.testing.simulated.blobs import Fault, SimulatedBlobs, plan_faults


@pytest.fixture
def store() -> SimulatedBlobs:
    return SimulatedBlobs()


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.THROTTLED, Fault.CONFLICT])
def test_a_refused_put_did_nothing(store: SimulatedBlobs, fault: Fault) -> None:
    store.inject(fault, method="put_if_absent")

    with pytest.raises(Unavailable):
        store.put_if_absent("k", b"1")

    assert store.contents == {}
    assert store.put_if_absent("k", b"1")


def test_a_put_whose_answer_is_lost_was_done(store: SimulatedBlobs) -> None:
    store.inject(Fault.FAIL_AFTER, method="put_if_absent")

    with pytest.raises(Indeterminate):
        store.put_if_absent("k", b"1")

    assert not store.put_if_absent("k", b"2")
    assert store.contents == {"k": b"1"}


def test_a_late_put_lands_when_asked_and_loses_to_who_was_earlier(store: SimulatedBlobs) -> None:
    store.inject(Fault.LATE, method="put_if_absent", count=2)
    for key in ("k", "l"):
        with pytest.raises(Indeterminate):
            store.put_if_absent(key, b"late")
    assert store.put_if_absent("k", b"early")

    assert store.land() == 2

    assert store.contents == {"k": b"early", "l": b"late"}
    assert store.land() == 0


def test_a_late_delete_may_meet_a_new_object(store: SimulatedBlobs) -> None:
    store.put_if_absent("k", b"old")
    store.inject(Fault.LATE, method="delete")
    with pytest.raises(Unavailable):
        store.delete("k")

    store.upload("k", [b"new"])
    store.land()

    assert store.contents == {}


def test_a_create_delivered_twice_is_answered_exists_for_its_own_work(store: SimulatedBlobs) -> None:
    store.inject(Fault.DUPLICATE, method="put_if_absent")

    assert not store.put_if_absent("k", b"mine")
    assert store.contents == {"k": b"mine"}


def test_a_broken_upload_takes_one_piece_and_shows_nothing(store: SimulatedBlobs) -> None:
    taken = []
    store.inject(Fault.BROKEN, method="upload")

    with pytest.raises(Unavailable):
        store.upload("k", (taken.append(number) or b"1" for number in range(9)))  # type: ignore[func-returns-value]

    assert taken == [0]
    assert store.contents == {}


def test_a_broken_read_gives_one_chunk_first(store: SimulatedBlobs) -> None:
    store.put_if_absent("k", b"0123456789")
    store.inject(Fault.BROKEN, method="read")
    reader = store.read("k", 0, 10, chunk_bytes=4)

    assert next(reader) == b"0123"
    with pytest.raises(Unavailable):
        next(reader)


def test_other_faults_are_named(store: SimulatedBlobs) -> None:
    stat = store.upload("k", [b"1"])
    store.inject(Fault.PRECONDITION, method="get_range")
    store.inject(Fault.DENIED, method="stat")
    store.inject(Fault.SERVER_ERROR, method="upload")
    store.inject(Fault.SERVER_ERROR, method="list")

    with pytest.raises(BlobChanged):
        store.get_range("k", 0, 1, etag=stat.etag)
    with pytest.raises(Denied):
        store.stat("k")
    with pytest.raises(Indeterminate):
        store.upload("l", [b"1"])
    with pytest.raises(Unavailable):
        list(store.list())
    with pytest.raises(ValueError, match="no fault of stat"):
        store.inject(Fault.LATE, method="stat")
    assert store.contents == {"k": b"1"}


def test_a_list_held_back_shows_what_was(store: SimulatedBlobs) -> None:
    store.put_if_absent("old", b"1")
    store.hold_lists_back()
    store.put_if_absent("new", b"1")
    store.delete("old")

    assert [stat.key for stat in store.list()] == ["old"]

    store.let_lists_go()
    assert [stat.key for stat in store.list()] == ["new"]


def test_faults_wait_for_their_call_and_are_taken_back(store: SimulatedBlobs) -> None:
    store.inject(Fault.FAIL_BEFORE, method="stat", after=1, count=2)

    assert store.stat("k") is None
    for _ in range(2):
        with pytest.raises(Unavailable):
            store.stat("k")
    assert store.stat("k") is None
    store.inject(Fault.FAIL_BEFORE, method="stat")
    store.heal()
    assert store.stat("k") is None


def test_a_sweep_meets_every_fault_at_every_call() -> None:
    def scenario(store: SimulatedBlobs) -> None:
        store.upload("k.seg", [b"12", b"34"])
        store.put_if_absent("k.idx", b"56")
        stat = store.stat("k.seg")
        assert stat is not None
        store.get_range("k.seg", 0, 4, etag=stat.etag)
        list(store.list())
        store.delete("k.idx")

    healthy = SimulatedBlobs()
    scenario(healthy)
    planned = list(plan_faults(healthy.calls))
    assert [call.method for call in healthy.calls] == ["upload", "put_if_absent", "stat", "get_range", "list", "delete"]
    assert len(planned) == 8 + 8 + 4 + 5 + 4 + 7

    for call, fault in planned:
        store = SimulatedBlobs()
        store.fail_at(call.index, fault)
        if fault is Fault.DUPLICATE:
            scenario(store)
        else:
            with pytest.raises(ForebayError, match="injected"):
                scenario(store)
            assert len(store.calls) == call.index + 1


def test_a_store_deaf_to_creates_is_refused_by_the_probe() -> None:
    store = SimulatedBlobs(honours_create=False)
    store.put_if_absent("k", b"1")

    assert store.put_if_absent("k", b"2")
    with pytest.raises(Unsupported):
        store.probe()


def test_handles_share_objects_and_faults(store: SimulatedBlobs) -> None:
    twin: Callable[[], SimulatedBlobs] = store.another_process
    twin().put_if_absent("k", b"1")
    store.inject(Fault.FAIL_BEFORE, method="stat")

    with pytest.raises(Unavailable):
        twin().stat("k")

    assert store.contents == {"k": b"1"}
    assert len(store.calls) == 2
