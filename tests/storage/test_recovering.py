"""Recovery of a whole directory: states by range, shards in parallel, honest progress, and failures that are named."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from pathlib import Path

import pytest

import forebay
from forebay import Settings, Storage, Unavailable
from forebay.catalog import state_entries
from forebay.definitions import Definitions, FoundDefinitions
from forebay.format.metadata.descriptor import ShardState
from forebay.format.metadata.keys import PREFIX, cur_key, deletes_key, segment_key, state_key, topics_prefix
from forebay.format.metadata.value import encode_value
from forebay.metadata import MemoryMetadata, MetadataStore, Put
from forebay.shard import SegmentShard
from forebay.shard.ownership import BATCH_SHARDS
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from forebay.topics import TopicName
from tests.storage.rig import QUICK, WatchedDisk, quick, values
from tests.support.waiting import PATIENCE

SHARDS = 40


def with_shards(path: Path, count: int = SHARDS) -> None:
    """A log with a record in each of so many shards, closed in order."""
    with forebay.open(path, QUICK) as log:
        topic = log.create_topic("t", partitions=count)
        for partition in range(count):
            topic.append(b"v", partition=partition)


def with_openers(count: int) -> Settings:
    return Settings.load(overrides={**QUICK, "runtime": {**QUICK["runtime"], "openers": count}})


def count_reads(store: MetadataStore, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the state of each shard and each definition are read by themselves, and how many ranges are."""
    counts, get, ranges = Counter[str](), store.get, store.range

    def counted_get(key: str) -> object:
        counts.update(
            ["state"] if key.endswith("/state") else ["definition"] if key.startswith(topics_prefix()) else []
        )
        return get(key)

    def counted_range(prefix: str, **named: object) -> object:
        counts.update(["range"] if prefix.endswith("/storage/topics/") else [])
        return ranges(prefix, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "get", counted_get)
    monkeypatch.setattr(store, "range", counted_range)
    return counts


def test_states_are_read_by_range_and_each_once_more_under_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each state was read five times, one by one, and the definition for each shard."""
    with_shards(tmp_path / "log")
    with Storage.open(tmp_path / "log", quick(), clock=ManualClock()) as log:
        counts = count_reads(inside(log).metadata, monkeypatch)

        recovered = log.recover()

        assert (recovered.opened, recovered.failed, recovered.is_degraded) == (SHARDS, (), False)
        # A worker may look at a shard that is open by now, too.
        assert counts["state"] < 2 * SHARDS and counts["range"] <= 2
        assert counts["definition"] == 0
        log.topic("t")
        assert counts["definition"] == 0, "what was listed is remembered"


def test_a_long_history_is_stepped_over_where_states_are_read() -> None:
    store, states = MemoryMetadata(), set[str]()
    keys: list[str] = []
    for topic in ("a", "b"):
        for partition in range(3):
            keys += [segment_key("shop", topic, partition, offset) for offset in range(700)]
            keys += [deletes_key("shop", topic, partition, offset) for offset in range(150)]
            keys.append(cur_key("shop", topic, partition))
            states.add(state_key("shop", topic, partition))
    keys += sorted(states)
    for first in range(0, len(keys), 100):
        store.transaction([], [Put(key, b"{}") for key in keys[first : first + 100]])
    ranges = 0
    inner = store.range

    def counted(prefix: str, *, start_after: str | None = None, limit: int | None = None) -> object:
        nonlocal ranges
        ranges += 1
        return inner(prefix, start_after=start_after, limit=limit)

    store.range = counted  # type: ignore[assignment,method-assign]

    assert set(state_entries(store, prefix=PREFIX)) == states
    assert ranges <= 2 * len(states) + 1


def test_shards_are_opened_in_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_shards(tmp_path / "log", 4)
    together, inner = threading.Barrier(4), SegmentShard.open

    def recover(*arguments: object, **named: object) -> SegmentShard:
        together.wait(PATIENCE)
        return inner(*arguments, **named)  # type: ignore[arg-type]

    with Storage.open(tmp_path / "log", with_openers(4)) as log:
        monkeypatch.setattr(SegmentShard, "open", recover)
        assert log.recover().opened == 4
        assert not any(thread.name == "forebay-opener" and thread.is_alive() for thread in threading.enumerate())


def test_progress_grows_from_the_first_moment_in_the_thread_that_recovers(tmp_path: Path) -> None:
    """It was by bytes alone: nothing was heard while thousands of shards were acquired."""
    with_shards(tmp_path / "log", 4)
    heard: list[tuple[float, int]] = []
    with forebay.open(tmp_path / "log", QUICK) as log:
        log.recover(lambda done: heard.append((done, len(inside(log).shards()))))
        done = [one for one, _ in heard]

        assert done == sorted(done) and done[-1] == 1.0 and done.count(1.0) == 1
        assert [(one, opened) for one, opened in heard if one <= 0.5] == [(n / 8, 0) for n in range(1, 5)]
        # Shards that ended in order are not walked; each counts with what it holds all the same.
        assert [one for one in done if one > 0.5] == pytest.approx([0.625, 0.75, 0.875, 0.999, 1.0], abs=0.05)


def test_a_shard_that_cannot_be_opened_is_named_and_the_others_are_in_use(tmp_path: Path) -> None:
    with_shards(tmp_path / "log", 3)
    disk = WatchedDisk()
    with Storage.open(tmp_path / "log", quick(), disk=disk) as log:
        topic_id = log.topic("t").spec.topic_id

        def refuse(kind: str, path: str) -> None:
            if f"{topic_id}_1" in path and kind == "open":
                raise OSError(errno.EIO, "broken", path)

        disk.meet = refuse
        recovered = log.recover()

        assert recovered.is_degraded and recovered.opened == 2
        (failed,) = recovered.failed
        assert str(failed).startswith("default/t[1]: ") and "once the disk works, try again" in str(failed.error)
        with pytest.raises(Unavailable, match=r"t\[1\] cannot be opened"):
            recovered.raise_failed()
        assert [log.topic("t").append(b"w", partition=partition) for partition in (0, 2)] == [1, 1]
        disk.meet = lambda kind, path: None
        again = log.recover()
        assert (again.opened, again.failed) == (1, ())
        again.raise_failed()


def test_a_damaged_state_is_the_trouble_of_its_shard_alone(tmp_path: Path) -> None:
    with_shards(tmp_path / "log", 3)
    with forebay.open(tmp_path / "log", QUICK) as log:
        inside(log).metadata.transaction([], [Put(state_key("default", "t", 1), b"no state")])

        recovered = log.recover()

        assert [failed.ref.partition for failed in recovered.failed] == [1] and recovered.opened == 2


@pytest.mark.parametrize("after", [0.25, 0.75])
def test_a_recovery_that_is_interrupted_ends_and_the_next_one_finishes(tmp_path: Path, after: float) -> None:
    with_shards(tmp_path / "log", 8)

    def interrupt(done: float) -> None:
        if done >= after:
            raise KeyboardInterrupt

    with Storage.open(tmp_path / "log", with_openers(1)) as log:
        with pytest.raises(KeyboardInterrupt):
            log.recover(interrupt)

        recovered = log.recover()
        assert recovered.failed == () and len(inside(log).shards()) == 8
        assert values(log.topic("t").read()) == [b"v"] * 8


def test_what_was_not_foreseen_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_shards(tmp_path / "log", 2)

    def broken(*arguments: object, **named: object) -> SegmentShard:
        raise ZeroDivisionError

    with forebay.open(tmp_path / "log", QUICK) as log:
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(SegmentShard, "open", broken)
            log.recover()
        assert log.recover().failed == ()


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_topic_that_is_sealed_while_its_shards_are_recovered_is_not_named_as_failed(
    tmp_path: Path, *, is_moved: bool
) -> None:
    """It is not degraded: it goes on elsewhere, or here once it is taken back."""
    with_shards(tmp_path / "log", 2)
    settings = {**QUICK, "storage": {"handoff_root": str(tmp_path / "handoff")}}
    with forebay.open(tmp_path / "log", settings) as log:
        log.create_topic("u").append(b"v")
    with forebay.open(tmp_path / "log", settings) as log:
        sealed: list[object] = []

        def seal(done: float) -> None:
            if done == 0.5 and not sealed:
                sealed.extend(log.seal_topic("t", target="0" * 32 if is_moved else None))

        recovered = log.recover(seal)

        assert (recovered.opened, recovered.failed, len(sealed)) == (1, (), 2)


def test_a_shard_that_another_directory_takes_over_meanwhile_is_not_named_as_failed(tmp_path: Path) -> None:
    with_shards(tmp_path / "log", 2)
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic_id = log.topic("t").spec.topic_id

        def take_over(done: float) -> None:
            state = ShardState(incarnation=topic_id, epoch=7, holder="0" * 32)
            inside(log).metadata.transaction([], [Put(state_key("default", "t", 1), encode_value(state))])

        recovered = log.recover(take_over)

        assert (recovered.opened, recovered.failed) == (1, ())


@pytest.mark.slow
@pytest.mark.parametrize("at", [0.25, 0.5])
def test_a_metadata_store_that_goes_away_is_one_error_and_no_failure_of_each_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: float
) -> None:
    with_shards(tmp_path / "log", 2 * BATCH_SHARDS)
    asked: list[str] = []

    def away(*arguments: object, **named: object) -> None:
        asked.append(threading.current_thread().name)
        raise Unavailable("injected: away")

    with Storage.open(tmp_path / "log", with_openers(2)) as log:
        inside(log).workers.stop()
        with monkeypatch.context() as patch:

            def go_away(done: float) -> None:
                if done == at:
                    for method in ("get", "range", "transaction", "session_alive"):
                        patch.setattr(inside(log).metadata, method, away)

            with pytest.raises(Unavailable, match=r"the metadata store does not answer.*injected: away.*0 are open"):
                log.recover(go_away)
            assert len(asked) < 20, "each opener stops at its first shard"

        recovered = log.recover()
        assert recovered.failed == () and len(inside(log).shards()) == 2 * BATCH_SHARDS


def test_a_definition_that_is_altered_meanwhile_is_the_one_that_shards_are_opened_by(tmp_path: Path) -> None:
    """Also if the change was seen after the topics were listed and before anything of them was followed here."""
    with_shards(tmp_path / "log", 1)
    with Storage.open(tmp_path / "log", quick(), clock=ManualClock()) as log:
        elsewhere = Definitions(inside(log).metadata, PREFIX, ManualClock(seed=1))
        definitions, listed = inside(log).definitions, Definitions.all_to_use

        def all_to_use(these: Definitions) -> FoundDefinitions:
            found = listed(these)
            elsewhere.alter(TopicName("default", "t"), lambda spec: spec.altered(ttl_ms=10_000_000))
            inside(log).follow_changes()
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Definitions, "all_to_use", all_to_use)
            assert log.recover().opened == 1
        (shard,) = inside(log).shards()
        assert shard.ref.spec.ttl_ms == 10_000_000 == definitions.get(shard.ref.spec.name).ttl_ms


@pytest.mark.slow
def test_a_log_that_is_closed_meanwhile_says_so(tmp_path: Path) -> None:
    with_shards(tmp_path / "log", 2)
    log = forebay.open(tmp_path / "log", QUICK)

    def close(done: float) -> None:
        if done == 0.5:
            log.close()

    with pytest.raises(forebay.Closed):
        log.recover(close)


def test_a_topic_that_is_deleted_and_created_again_meanwhile_is_not_opened_by_what_was_acquired(tmp_path: Path) -> None:
    """The shard of the later topic, in another directory, may have just the epoch that the one before was given."""
    with_shards(tmp_path / "log", 1)
    with forebay.open(tmp_path / "log", QUICK) as log:
        old = log.topic("t").spec

        def recreate(done: float) -> None:
            if done == 0.5 and log.topic("t").spec == old:
                log.delete_topic("t")
                spec = log.create_topic("t").spec
                state = ShardState(incarnation=spec.topic_id, epoch=2, holder="0" * 32)
                inside(log).metadata.transaction(
                    [], [Put(state_key("default", "t", 0, prefix=PREFIX), encode_value(state))]
                )

        assert log.recover(recreate).opened == 0

        assert log.status().open == ()
        assert not (tmp_path / "log" / "shards" / f"{old.topic_id}_0").exists()


def test_recovering_twice_or_with_shards_in_use_opens_nothing_again(tmp_path: Path) -> None:
    with_shards(tmp_path / "log", 3)
    with forebay.open(tmp_path / "log", QUICK) as log:
        log.topic("t").append(b"w", partition=1)
        epochs = log.topic("t").epoch(1)

        assert (log.recover().opened, log.recover().opened) == (2, 0)
        assert log.topic("t").epoch(1) == epochs


def test_a_log_without_files_has_nothing_to_recover() -> None:
    with forebay.open(":memory:") as log:
        assert (log.recover().opened, log.recover().is_degraded) == (0, False)


def test_a_lost_directory_names_its_way_out_in_the_result(tmp_path: Path) -> None:
    with_shards(tmp_path / "log", 2)
    (lost,) = (tmp_path / "log" / "shards").glob("*_1")
    lost.rename(tmp_path / "lost")
    with forebay.open(tmp_path / "log", QUICK) as log:
        (failed,) = log.recover().failed
        assert isinstance(failed.error, forebay.DataLoss) and "has lost its directory" in str(failed.error)


@pytest.mark.parametrize("engine", ["segment", "rocksdb"])
@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_topic_that_is_deleted_while_its_shards_are_recovered_stays_deleted(
    tmp_path: Path, engine: str, *, is_made_again: bool
) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        log.create_topic("t", engine=engine).append(b"old")
    with forebay.open(tmp_path / "log", QUICK) as log:

        def delete(done: float) -> None:
            if done == 0.5 and log.topics() and log.topic("t").spec.topic_id == old:
                log.delete_topic("t")
                if is_made_again:
                    log.create_topic("t", engine=engine).append(b"new")

        old = log.topic("t").spec.topic_id

        recovered = log.recover(delete)

        assert (recovered.opened, recovered.failed) == (0, ())
        assert [shard.ref.spec.topic_id for shard in inside(log).shards()].count(old) == 0
        topic = log.create_topic("t", engine=engine, exist_ok=True)
        assert values(topic.read()) == ([b"new"] if is_made_again else [])
        assert topic.append(b"v") == (1 if is_made_again else 0)


def test_a_topic_that_is_deleted_while_others_are_acquired_is_not_named_as_failed(tmp_path: Path) -> None:
    """Its directory is gone then, which looked like one that was lost."""
    with_shards(tmp_path / "log", BATCH_SHARDS)
    with forebay.open(tmp_path / "log", QUICK) as log:
        log.create_topic("u").append(b"v")
    with forebay.open(tmp_path / "log", QUICK) as log:

        def delete(done: float) -> None:
            if log.topics("default/u"):
                log.delete_topic("u")

        recovered = log.recover(delete)

        assert (recovered.opened, recovered.failed) == (BATCH_SHARDS, ())
