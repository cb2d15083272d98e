"""Owners that die, sleep too long or lose sight of the metadata store: one at a time, and no offset stands for two."""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay import DataLoss, Fenced, ForebayError, Gap, Indeterminate, Moved, Reason, Storage, Topic, Unavailable
from forebay.shard import NextSource
from tests.ledger import Ledger
from tests.moves.children import OwnerChild, environment_of
from tests.moves.conftest import WITH_SERVERS
from tests.support.environments import directories
from tests.support.environments.directories import (
    RESERVED,
    TOPIC,
    Environment,
    clear_up,
    id_of,
    numbers,
    pieces_of,
    state_of,
    told,
)
from tests.support.etcd import Cluster, running
from tests.support.waiting import until

pytestmark = pytest.mark.slow

ZOMBIE_S = 10
"""The lease of an owner that a test stops until it is over, by the clock of etcd and by its own."""


@pytest.fixture(params=["sqlite", pytest.param("etcd", marks=WITH_SERVERS)])
def endpoints(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Where the metadata store is, if it is not a file."""
    if request.param == "sqlite":
        return ()
    cluster: Cluster = request.getfixturevalue("etcd")
    return cluster.endpoints


@pytest.fixture
def end_leases(request: pytest.FixtureRequest, endpoints: tuple[str, ...]) -> Callable[[], None]:
    """Ends every lease now, as etcd does once it was not renewed for long: all are of owners that were killed."""

    def end() -> None:
        if endpoints:
            revoke_leases(request.getfixturevalue("etcd"))

    return end


def revoke_leases(etcd: Cluster) -> None:
    for lease in etcd.call("lease/leases").get("leases", []):
        etcd.call("lease/revoke", {"ID": lease["ID"]})


@pytest.fixture
def environment(tmp_path: Path, endpoints: tuple[str, ...]) -> Environment:
    return environment_of(tmp_path, endpoints)


def texts(first: int, stop: int) -> list[str]:
    return [str(number) for number in range(first, stop)]


def taken_over(log: Storage) -> Topic:
    """The topic, once its last owner is held for dead."""

    def is_ours() -> bool:
        with contextlib.suppress(Unavailable):
            log.topic(TOPIC).acquire()
            return True
        return False

    until(is_ours)
    return log.topic(TOPIC)


def read_with_gaps(topic: Topic) -> tuple[list[tuple[int, bytes | None]], list[Gap]]:
    gaps: list[Gap] = []
    records = told(topic.read(0, on_gap=lambda _, gap: gaps.append(gap)))
    return records, gaps


def test_what_a_killed_owner_had_not_exported_is_a_named_gap(
    environment: Environment, endpoints: tuple[str, ...], end_leases: Callable[[], None], ledger: Ledger
) -> None:
    with OwnerChild(environment.root, "A", endpoints) as owner:
        owner.do("create", "fsync")
        assert owner.do("append", *texts(0, 30)) == "acked 0"
        assert owner.do("export") == "done"
        assert owner.do("append", *texts(30, 40)) == "acked 30"
        owner.kill()
    end_leases()
    ledger.count("kills", figure="owner with records that are not history")
    with environment.open("B") as b, environment.open("C") as c:
        lost = state_of(b, b.topic(TOPIC)).reserved_end
        assert lost >= 40
        topic = taken_over(b)
        decision, gap = topic.recovery(), Gap(30, lost, Reason.LOST)
        assert (decision.next_offset, decision.source, decision.gap) == (lost, NextSource.CATALOG, gap)
        assert topic.append(b"%d" % lost) == lost
        with pytest.raises(DataLoss, match=rf"\[30, {lost}\) lost"):
            list(topic.read())
        expected = (numbers(0, 30) + numbers(lost, lost + 1), [gap])
        assert read_with_gaps(topic) == expected

        with environment.open("A") as a:
            with pytest.raises(Moved, match=f"owned by the living session .* in directory .*{id_of(b)}"):
                a.topic(TOPIC).append(b"late")
            clear_up(a)
            assert environment.files("A") == []
            assert environment.aside("A") != [], "kept for whoever wants to salvage them"
            assert [piece.epoch for piece in pieces_of(a, topic) if piece.start >= 30 and piece.records] == []
            b.seal_topic(TOPIC, target=id_of(a))
            again = a.topic(TOPIC)
            assert again.append(b"%d" % (lost + 1)) == lost + 1
            assert read_with_gaps(again) == (numbers(0, 30) + numbers(lost, lost + 2), [gap])
            assert environment.aside("A") != []
            a.seal_topic(TOPIC, target=id_of(c))
        assert read_with_gaps(c.topic(TOPIC)) == (numbers(0, 30) + numbers(lost, lost + 2), [gap])
        assert all(piece.epoch >= 2 for piece in pieces_of(c, topic) if piece.start >= 30)


def test_an_owner_that_comes_back_before_anyone_else_has_lost_nothing(
    environment: Environment, endpoints: tuple[str, ...], end_leases: Callable[[], None], ledger: Ledger
) -> None:
    with OwnerChild(environment.root, "A", endpoints) as owner:
        owner.do("create", "disk")
        owner.do("append", *texts(0, 30))
        owner.do("export")
        owner.do("append", *texts(30, 40))
        owner.kill()
    end_leases()
    ledger.count("kills", figure="owner that comes back")
    with environment.open("A") as a:
        topic = taken_over(a)
        assert (topic.recovery().source, topic.recovery().exact) == (NextSource.LOCAL, True)
        assert topic.append(b"40") == 40
        assert told(topic.read()) == numbers(0, 41)


def test_a_killed_seal_is_taken_back_by_the_next_owner(
    environment: Environment, endpoints: tuple[str, ...], end_leases: Callable[[], None], ledger: Ledger
) -> None:
    with OwnerChild(environment.root, "A", endpoints) as owner:
        owner.do("create", "fsync")
        owner.do("append", *texts(0, 30))
        owner.begin("seal-and-die")
        with pytest.raises(AssertionError, match="the child has ended"):
            owner.heard()
    end_leases()
    ledger.count("kills", figure="owner in mid-seal")
    with environment.open("A") as a:
        topic = taken_over(a)
        assert topic.append(b"30") == 30
        assert told(topic.read()) == numbers(0, 31)
        assert a.seal_topic(TOPIC)[0].next_offset == 31


@pytest.mark.slow
@pytest.mark.xdist_group("moves-servers")
def test_a_zombie_acknowledges_nothing_after_it_was_taken_over(etcd: Cluster, tmp_path: Path, ledger: Ledger) -> None:
    environment = environment_of(tmp_path, etcd.endpoints)
    with environment.open("B") as b, OwnerChild(tmp_path, "A", etcd.endpoints, ttl_s=ZOMBIE_S) as zombie:
        zombie.do("create", "fsync")
        zombie.do("append", *texts(0, 10))
        zombie.do("export")
        zombie.begin("flood", str(tmp_path / "taken-over"))
        acked = [int(zombie.heard().split()[1]) for _ in range(20)]
        zombie.signal(signal.SIGSTOP)
        topic = taken_over(b)
        began = topic.recovery().next_offset
        assert topic.append(b"b") == began
        (tmp_path / "taken-over").touch()
        zombie.signal(signal.SIGCONT)

        answers: list[str] = []
        while not answers or answers[-1].startswith("acked"):
            answers.append(zombie.heard())
        late = [(int(offset), since) for _, offset, since in map(str.split, answers[:-1])]
        assert answers[-1].split()[0] in ("Fenced", "Indeterminate", "Moved"), answers[-1]
        assert max([*acked, *(offset for offset, _ in late)]) < began
        assert [offset for offset, since in late if since == "after"] == [], (
            "begun after the take-over, and acknowledged"
        )
        for word in ("append late", "export", "append later", "export"):
            assert not zombie.do(*word.split()).startswith(("acked", "done"))
            ledger.count("zombie writes")
        until(lambda: zombie.do("append", "late").startswith("Moved"))
        assert id_of(b) in zombie.do("append", "late")

        records, gaps = read_with_gaps(topic)
        assert records == [*numbers(0, 10), (began, b"b")]
        assert gaps == [Gap(10, began, Reason.LOST)]
        assert {piece.epoch for piece in pieces_of(b, topic) if piece.start >= 10} == {2}


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[Cluster]:
    """One that this test may stop."""
    (tmp_path / "etcd").mkdir()
    with running(tmp_path / "etcd", 1) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.xdist_group("moves-servers")
def test_without_metadata_appends_go_on_up_to_what_is_reserved(own_etcd: Cluster, tmp_path: Path) -> None:
    environment = directories.in_etcd(directories.shared_fs(tmp_path), own_etcd.endpoints, request_timeout_ms=1_000)
    with environment.open("A") as a:
        topic = a.create_topic(TOPIC, durability="fsync")
        assert topic.append(b"0") == 0
        until(lambda: state_of(a, topic).reserved_end >= RESERVED)
        own_etcd.members[0].kill()

        end = 1
        with pytest.raises(Unavailable) as refused:
            while True:
                end = topic.append(b"%d" % end) + 1
        assert not isinstance(refused.value, Moved)
        with pytest.raises(Unavailable):
            topic.append(b"x")
        assert told(topic.read()) == numbers(0, end)
        own_etcd.start_all()

        assert end >= RESERVED
        # What was asked for when etcd died may have been granted unheard, and by now more is.
        assert state_of(a, topic).reserved_end >= end, "nothing was used beyond what was reserved"
        assert topic.append(b"%d" % end) == end
        assert told(topic.read()) == numbers(0, end + 1)


@pytest.mark.slow
@pytest.mark.xdist_group("moves-servers")
def test_an_owner_whose_session_ended_stops_and_goes_on_if_nobody_came(own_etcd: Cluster, tmp_path: Path) -> None:
    environment = directories.in_etcd(directories.shared_fs(tmp_path), own_etcd.endpoints, ttl_s=ZOMBIE_S)
    with environment.open("A") as a:
        topic = a.create_topic(TOPIC, durability="fsync")
        told_so = {topic.append(b"first"): b"first"}
        epoch = state_of(a, topic).epoch
        revoke_leases(own_etcd)

        refusals: list[ForebayError] = []
        in_doubt, last = set[bytes](), 0
        for number in itertools.count():
            value = b"%d" % number
            try:
                last = topic.append(value)
                told_so[last] = value
            except (Fenced, Indeterminate, Unavailable) as error:
                refusals.append(error)
                in_doubt |= {value} if isinstance(error, Indeterminate) else set()
            else:
                if refusals:
                    break

        assert isinstance(refusals[0], Fenced | Indeterminate)
        assert state_of(a, topic).epoch > epoch
        found = dict(told(topic.read()))
        assert list(found) == list(range(last + 1))
        assert found.items() >= told_so.items()
        assert {value for offset, value in found.items() if offset not in told_so} <= in_doubt
