"""What cannot move is refused before anything has changed, and whichever caller was refused did no harm."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from forebay import (
    Conflict,
    Corrupt,
    DataLoss,
    Indeterminate,
    Invalid,
    Moved,
    Settings,
    Storage,
    Unavailable,
    Unsupported,
)
from forebay.format.metadata.descriptor import Phase
from forebay.format.metadata.value import encode_value
from forebay.metadata import Compare, Delete, MetadataStore, Operation, Outcome, Put, Session
from forebay.places import is_local
from forebay.settings import MetadataSettings, RetentionSettings, StorageSettings
from forebay.shard.seal import bring_into_history
from forebay.testing.checks.moves import Operations
from forebay.testing.inside import inside
from tests.ledger import Ledger
from tests.support.environments import directories
from tests.support.environments.directories import (
    TOPIC,
    id_of,
    keys_of,
    metadata_of,
    numbers,
    pieces_of,
    shard_of,
    state_of,
    told,
)

pytestmark = pytest.mark.slow


def test_a_local_topic_without_a_place_to_meet_is_refused_before_it_is_sealed(tmp_path: Path) -> None:
    environment = directories.local(tmp_path, handoff=False)
    with environment.open("A") as a, environment.open("B") as b:
        topic = a.create_topic(TOPIC)
        topic.append_many([b"0", b"1"])
        before = state_of(a, topic)

        with pytest.raises(Unsupported, match=r"lies in this directory alone; .*storage\.handoff_root"):
            a.seal_topic(TOPIC, target=id_of(b))

        assert state_of(a, topic).phase is Phase.OPEN
        assert topic.append(b"2") == 2
        assert state_of(a, topic).next_offset == before.next_offset
        assert told(topic.read()) == numbers(0, 3)


def test_a_local_topic_sealed_where_it_lies_goes_on_there_alone(tmp_path: Path) -> None:
    environment = directories.local(tmp_path, handoff=False)
    with environment.open("A") as a, environment.open("B") as b:
        topic = a.create_topic(TOPIC, partitions=2)
        for partition in range(2):
            topic.append_many([b"0", b"1"], partition=partition)

        states = a.seal_topic(TOPIC)

        assert [state.target for state in states] == [id_of(a)] * 2
        assert a.seal_topic(TOPIC) == states, "a repetition finds it done"
        with pytest.raises(Moved, match=f"moved to directory .*{id_of(a)}.: use it there"):
            b.topic(TOPIC).append(b"x", partition=0)
    with environment.open("A") as a:
        topic = a.topic(TOPIC)
        assert topic.append(b"2", partition=0) == 2
        assert told(topic.read(0, partition=0)) == numbers(0, 3)


def test_records_of_a_local_directory_are_not_taken_over_by_another(tmp_path: Path) -> None:
    environment = directories.local(tmp_path)
    with environment.open("A") as a:
        topic = a.create_topic(TOPIC)
        topic.append_many([b"0", b"1", b"2"])
        before, home = state_of(a, topic), id_of(a)
    with environment.open("B") as b:
        for _ in range(2):
            with pytest.raises(Conflict, match=f"held by directory .*{home}. and its records lie there: open that"):
                b.topic(TOPIC).append(b"x")
        assert state_of(b, topic) == before, "not even for a moment"
    with environment.open("A") as a:
        topic = a.topic(TOPIC)
        assert topic.append(b"3") == 3
        assert told(topic.read()) == numbers(0, 4)
        assert state_of(a, topic).epoch > before.epoch


def test_a_contradiction_is_refused_every_time_and_not_only_once(tmp_path: Path, committed: list[Operations]) -> None:
    environment = directories.shared_fs(tmp_path)
    with environment.open("A") as a:
        topic = a.create_topic(TOPIC, durability="fsync")
        topic.append_many([b"%d" % n for n in range(5)])
        (sealed,) = a.seal_topic(TOPIC)
        a.unseal_topic(TOPIC)
        topic.append_many([b"5", b"6"])
        key, metadata = keys_of(a, topic).state, metadata_of(a)
        metadata.transaction([], [Put(key, encode_value(sealed))])
    committed.clear()
    with environment.open("A") as a:
        for _ in range(3):
            with pytest.raises(Conflict, match="was sealed at 5 by .* but the local log goes to 7"):
                a.topic(TOPIC).append(b"x")
        assert state_of(a, topic).phase is Phase.SEALED
        metadata_of(a).transaction([], [Delete(key)])
        committed.clear()
        for _ in range(3):
            with pytest.raises(Conflict, match="the metadata store does not know the shard"):
                a.topic(TOPIC).append(b"x")
        assert metadata_of(a).get(key) is None


def empty(environment: directories.Environment, name: str) -> None:
    """Lose the files of all shards there."""
    for path in (environment.root / name / "shards").glob("*/*"):
        path.unlink()


class Died(BaseException):
    """The process ended here."""


def dying(monkeypatch: pytest.MonkeyPatch, store: MetadataStore, call: int, *, behind: bool) -> list[int]:
    """Have this thread die at this transaction, before or behind it; the transactions of it that came."""
    whole, calls, dies = store.transaction, list[int](), threading.current_thread()

    def transaction(compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        if threading.current_thread() is not dies:
            return whole(compares, operations)
        calls.append(len(calls))
        if calls[-1] == call and not behind:
            raise Died
        outcome = whole(compares, operations)
        if calls[-1] == call:
            raise Died
        return outcome

    monkeypatch.setattr(store, "transaction", transaction)
    return calls


@pytest.mark.parametrize("when", ["before", "behind"])
@pytest.mark.parametrize("wrong", ["sealed", "unknown", "emptied"])
def test_a_contradiction_is_refused_whichever_caller_died_over_refusing_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrong: str,
    when: str,
    ledger: Ledger,
    committed: list[Operations],
) -> None:
    """At each change of the metadata that the refusal makes, if it makes any."""
    environment = directories.local(tmp_path)
    with environment.open("A") as a:
        topic = a.create_topic(TOPIC, durability="fsync")
        topic.append_many([b"%d" % n for n in range(5)])
        (sealed,) = a.seal_topic(TOPIC)
        a.unseal_topic(TOPIC)
        topic.append_many([b"5", b"6"])
        bring_into_history(shard_of(topic))
        key = keys_of(a, topic).state
        if wrong != "emptied":
            metadata_of(a).transaction([], [Put(key, encode_value(sealed)) if wrong == "sealed" else Delete(key)])
    committed.clear()
    if wrong == "emptied":
        empty(environment, "A")
    said = {"sealed": "was sealed at 5", "unknown": "does not know the shard", "emptied": "its directory has no log"}
    error = DataLoss if wrong == "emptied" else Conflict
    for call in range(20):
        with environment.open("A") as a:
            calls = dying(monkeypatch, metadata_of(a), call, behind=when == "behind")
            with pytest.raises((Died, error)) as ended:
                a.topic(TOPIC).append(b"x")
            monkeypatch.undo()
        with environment.open("A") as a, pytest.raises(error, match=said[wrong]):
            a.topic(TOPIC).append(b"x")
        ledger.count("states", scenario="refusal")
        if not isinstance(ended.value, Died):
            break
    assert calls == ([] if wrong != "emptied" else [0, 1])


def test_a_contradiction_is_reported_even_if_the_metadata_store_fails_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = directories.local(tmp_path)
    with environment.open("A") as a:
        topic = a.create_topic(TOPIC, durability="fsync")
        topic.append_many([b"0", b"1"])
        bring_into_history(shard_of(topic))
    empty(environment, "A")
    with environment.open("A") as a:
        store = metadata_of(a)
        whole, calls, asks = store.transaction, list[int](), threading.current_thread()

        def transaction(compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
            if threading.current_thread() is asks:
                calls.append(1)
                if len(calls) == 2:
                    raise Indeterminate("its answer is lost")
            return whole(compares, operations)

        monkeypatch.setattr(store, "transaction", transaction)
        for _ in range(2):
            with pytest.raises(DataLoss, match="its directory has no log"):
                a.topic(TOPIC).append(b"x")


def with_one_forgotten(tmp_path: Path) -> tuple[directories.Environment, str]:
    """A directory of the topics a, b and c, where no caller knows the shard of b any more; the id of b."""
    environment = directories.local(tmp_path)
    with environment.open("A") as log:
        for name in ("shop/a", "shop/b", "shop/c"):
            log.create_topic(name).append_many([b"0", b"1"])
        topic = log.topic("shop/b")
        metadata_of(log).transaction([], [Delete(keys_of(log, topic).state)])
        return environment, topic.spec.topic_id


def test_a_contradiction_does_not_keep_other_topics_closed(tmp_path: Path) -> None:
    environment, _ = with_one_forgotten(tmp_path)
    with environment.open("A") as a:
        with pytest.raises(Conflict, match="does not know the shard"):
            a.recover().raise_failed()

        assert {str(shard.ref) for shard in inside(a).shards()} == {"shop/a[0]", "shop/c[0]"}


def test_a_damaged_log_that_no_caller_knows_does_not_keep_other_topics_closed(tmp_path: Path) -> None:
    environment, forgotten = with_one_forgotten(tmp_path)
    for path in (environment.root / "A" / "shards" / f"{forgotten}_0").glob("*.seg"):
        path.write_bytes(b"no segment")
    with environment.open("A") as a:
        with pytest.raises(Corrupt, match="header"):
            a.recover().raise_failed()

        assert {str(shard.ref) for shard in inside(a).shards()} == {"shop/a[0]", "shop/c[0]"}


def test_a_directory_that_starts_opens_its_own_topics_and_leaves_those_of_others(tmp_path: Path) -> None:
    environment = directories.shared_fs(tmp_path)
    with environment.open("A") as a:
        a.create_topic("shop/a").append_many([b"0", b"1"])
        home = id_of(a)
    with environment.open("B") as b:
        b.create_topic("shop/b").append_many([b"0", b"1"])
    with environment.open("B") as b:
        b.recover()

        assert b.topic("shop/b").recovery().clean
        theirs = b.topic("shop/a")
        assert state_of(b, theirs).holder == home, "nobody asked for it here"
    with environment.open("A") as a:
        a.recover()
        assert told(a.topic("shop/a").read()) == numbers(0, 2)


def test_a_topic_that_another_directory_has_does_not_keep_the_others_closed(tmp_path: Path) -> None:
    environment = directories.shared_fs(tmp_path)
    with environment.open("A") as a, environment.open("B") as b:
        a.create_topic("shop/a").append(b"0")
        b.create_topic("shop/b").append(b"0")
        b.create_topic("shop/c").append(b"0")
        a.seal_topic("shop/a", target=id_of(b))
        b.topic("shop/a").append(b"1")

        a.recover()
        b.recover()

        assert {shard.ref.spec.topic for shard in inside(b).engine.shards()} == {"a", "b", "c"}


def owned_by_another_process(log: Storage, name: str, lives: Storage) -> Session:
    """As if a process had died that had the topic open here, and its session, which is given, were not over yet."""
    session, topic = metadata_of(lives).session(60), log.topic(name)
    owned = msgspec.structs.replace(state_of(log, topic), owner=session.id)
    metadata_of(log).transaction([], [Put(keys_of(log, topic).state, encode_value(owned))])
    return session


def test_limits_are_applied_once_the_session_of_a_process_that_died_is_over(tmp_path: Path) -> None:
    environment = directories.shared_fs(tmp_path, retention=RetentionSettings(evict_interval_s=3_600))
    with environment.open("A") as a:
        a.create_topic("shop/b", cap_records=2).append_many([b"0", b"1", b"2"])
    with environment.open("A") as a, environment.open("B") as lives:
        session = owned_by_another_process(a, "shop/b", lives)
        inside(a).workers.limits.step()
        assert inside(a).shards() == []
        session.close()

        inside(a).workers.limits.step()

        assert [shard.offsets().evict_floor for shard in inside(a).shards()] == [1]


def test_a_topic_that_a_process_which_just_died_had_open_does_not_keep_the_others_closed(tmp_path: Path) -> None:
    environment = directories.shared_fs(tmp_path)
    with environment.open("A") as a:
        for name in ("shop/a", "shop/b", "shop/c"):
            a.create_topic(name).append(b"0")
    with environment.open("A") as a, environment.open("B") as lives:
        session = owned_by_another_process(a, "shop/b", lives)

        with pytest.raises(Unavailable, match="of this very directory"):
            a.recover().raise_failed()

        assert {shard.ref.spec.topic for shard in inside(a).engine.shards()} == {"a", "c"}
        session.close()
        a.recover()
        assert a.topic("shop/b").append(b"1") == 1


def test_retention_and_export_are_no_settings_of_a_local_directory() -> None:
    for group, change in (("retention", {"time_s": 60}), ("export", {"interval_s": 60}), ("store", {"root": "x"})):
        with pytest.raises(Invalid, match=f'storage.mode is "local", which has no {group}: leave the group'):
            Settings.load(overrides={group: change})


def test_what_was_written_locally_is_put_into_the_store_when_the_mode_changes(tmp_path: Path) -> None:
    before, after = directories.local(tmp_path, handoff=False), directories.shared_fs(tmp_path)
    with before.open("A") as a:
        topic = a.create_topic(TOPIC)
        for number in range(30):
            topic.append(b"%d" % number, producer=7, sequence=number)
            if number % 10 == 9:
                a.export_topic(TOPIC)
        assert [is_local(piece) for piece in pieces_of(a, topic)] == [True] * 3
        topic.append(b"30")
    with after.open("A") as a, after.open("B") as b:
        topic = a.topic(TOPIC)
        assert topic.append(b"31") == 31
        a.export_topic(TOPIC)
        assert [is_local(piece) for piece in pieces_of(a, topic)] == [False] * 4
        assert shard_of(topic).history.exported == 32
        a.seal_topic(TOPIC, target=id_of(b))
        taken = b.topic(TOPIC)
        assert taken.append(b"29", producer=7, sequence=29) == 29
        assert told(taken.read()) == numbers(0, 32)


def test_settings_that_name_another_store_say_so_and_change_nothing(tmp_path: Path) -> None:
    here, elsewhere = directories.shared_fs(tmp_path), directories.local(tmp_path, handoff=False)
    with here.open("A") as a:
        topic = a.create_topic(TOPIC)
        topic.append_many([b"0", b"1"])
        a.seal_topic(TOPIC)
    with elsewhere.open("B") as b, pytest.raises(Exception, match="open it with the settings that it was written with"):
        list(b.topic(TOPIC).read())
    with here.open("A") as a:
        topic = a.topic(TOPIC)
        assert topic.append(b"2") == 2
        assert told(topic.read()) == numbers(0, 3)


def test_two_directories_with_metadata_of_their_own_know_nothing_of_each_other(tmp_path: Path) -> None:
    environment = directories.shared_fs(tmp_path)
    with (
        environment.open("A", metadata=MetadataSettings()) as a,
        environment.open("B", metadata=MetadataSettings()) as b,
    ):
        a.create_topic(TOPIC).append(b"0")
        assert b.topics() == []
        assert b.create_topic(TOPIC).append(b"0") == 0
    assert StorageSettings().mode == "local"
