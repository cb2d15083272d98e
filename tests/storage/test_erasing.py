"""Erasing a key: every file that holds its bytes is named until the bytes are gone, and a rewriting removes them."""

from __future__ import annotations

import contextlib
import errno
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

import forebay.storage.erasure.segments
from forebay.appends.producer_window import ProducerWindow
from forebay.compacting.merging import Merge, SegmentTarget, merge
from forebay.disk import SystemDisk
from forebay.errors import ForebayError, Invalid, Unavailable
from forebay.format.control.offsets import OffsetSet
from forebay.format.index.lookups import Sought
from forebay.metadata import Put
from forebay.places import Places
from forebay.records import Record
from forebay.settings import ExportSettings
from forebay.storage import Storage, Topic
from forebay.storage.erasure.answer import Erasure
from forebay.storage.erasure.segments import SegmentErasure
from forebay.testing.inside import inside
from forebay.wal.files import LogFile, SealedFile
from tests.compacting.directly import check_sound, compacted
from tests.ledger import Ledger
from tests.support.environments import directories
from tests.support.environments.directories import Environment, metadata_of
from tests.support.erased import holders
from tests.support.soak import SOAK

KEY: Final = b"anna@example.net"
SECRET: Final = b"rue de la Paix 17"
TOPIC: Final = "shop/orders"
MODES: Final = ["local", "shared_fs"]


def environment_of(mode: str, root: Path) -> Environment:
    """Directories in a mode, whose background exports nothing by itself."""
    if mode == "local":
        return directories.local(root, handoff=False)
    return directories.shared_fs(root, export=ExportSettings(interval_s=3_600))


def filled(log: Storage, *, compression: str = "none", partitions: int = 1, rounds: int = 4) -> Topic:
    """A topic in which each log file has records of the key among others; the last file is not sealed."""
    topic = log.create_topic(TOPIC, partitions=partitions, compression=compression)
    for number in range(rounds):
        for partition in range(partitions):
            keys = [KEY if place % 4 == 1 else b"bob" for place in range(12)]
            values = [SECRET + b" %d" % place if place % 4 == 1 else b"%d-%d" % (number, place) for place in range(12)]
            topic.append_many(values, keys=keys, partition=partition)
        if number < rounds - 1:
            topic.rotate()
            log.export_topic(TOPIC)
            topic.append(b"%d" % number, key=b"bob", partition=0)
    return topic


def live(topic: Topic) -> list[tuple[int, int, bytes | None]]:
    """What a reader gets."""
    return [(record.partition, record.offset, record.value) for record in topic.read()]


def others(records: list[tuple[int, int, bytes | None]]) -> list[tuple[int, int, bytes | None]]:
    """The same without the secret."""
    return [record for record in records if not (record[2] or b"").startswith(SECRET)]


def places_of(erased: Erasure, environment: Environment) -> set[Path]:
    """The files that an answer names."""
    return {_path_of(remnant.place, environment) for remnant in erased.remains}


def _path_of(place: str, environment: Environment) -> Path:
    if place.startswith("/"):
        return Path(place)
    store, _, key = place.rpartition(":")
    root = environment.root / "store" if store == "directory" else environment.root / "one" / "loads"
    return root / key


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_every_file_is_named_however_often_it_is_asked_and_a_rewriting_leaves_none(
    mode: str, compression: str, tmp_path: Path
) -> None:
    environment = environment_of(mode, tmp_path)
    with environment.open("one") as log:
        topic = filled(log, compression=compression, partitions=2)
        before = live(topic)

        first, second = log.erase_key(TOPIC, KEY), log.erase_key(TOPIC, KEY)
        named = holders(SECRET, tmp_path)
        rewritten = log.erase_key(TOPIC, KEY, now=True)
        left = holders(SECRET, tmp_path) | holders(KEY, tmp_path)
        after = live(topic)

    assert (first.deleted, second.deleted) == (len(before) - len(others(before)), 0)
    assert places_of(first, environment) == places_of(second, environment) == named != set()
    assert first.commands == [f"forebay records erase {TOPIC} --key {KEY.decode()} --now --yes"]
    assert (rewritten.remains, rewritten.commands, left) == ((), [], set())
    assert after == others(before)
    check_sound(environment)
    with environment.open("one") as log:
        assert live(log.topic(TOPIC)) == others(before) and log.erase_key(TOPIC, KEY).remains == ()


@pytest.mark.parametrize("mode", MODES)
def test_objects_that_a_compaction_replaced_are_named_and_removed_before_their_grace(mode: str, tmp_path: Path) -> None:
    environment = environment_of(mode, tmp_path)
    with environment.open("one") as log:
        topic = filled(log)
        log.export_topic(TOPIC)
        compacted(environment)
        log.erase_key(TOPIC, KEY)
        compacted(environment)
        log.run_retention()

        asked = log.erase_key(TOPIC, KEY)
        named = holders(SECRET, tmp_path)
        rewritten = log.erase_key(TOPIC, KEY, now=True)

        assert places_of(asked, environment) >= named != set()
        assert all("removes it" in remnant.until for remnant in asked.remains if remnant.tier == "history")
        assert rewritten.remains == () and holders(SECRET, tmp_path) | holders(KEY, tmp_path) == set()
        assert len(live(topic)) == len(others(live(topic))) > 0
    check_sound(environment)


def test_what_was_set_aside_is_named_with_the_command_that_removes_it(tmp_path: Path) -> None:
    environment = environment_of("local", tmp_path)
    with environment.open("one") as log:
        filled(log, rounds=1)
    (segment,) = (tmp_path / "one" / "shards").glob("*/*.seg")
    torn = segment.read_bytes()
    segment.write_bytes(torn + torn[64 : torn.rindex(SECRET) + len(SECRET)])

    with environment.open("one") as log:
        rewritten = log.erase_key(TOPIC, KEY, now=True)
        (aside,) = environment.aside("one")
        assert [(remnant.tier, remnant.place) for remnant in rewritten.remains] == [("aside", str(aside))]
        assert holders(SECRET, tmp_path) == {aside}
        (command,) = rewritten.commands
        assert shlex.split(command) == ["rm", str(aside)]
        aside.unlink()

        assert log.erase_key(TOPIC, KEY).remains == ()


def test_an_upload_that_was_cut_short_is_named(tmp_path: Path) -> None:
    environment = environment_of("shared_fs", tmp_path)
    with environment.open("one") as log:
        filled(log)
        (one, *_) = (tmp_path / "store").glob("*/*.seg")
        left = tmp_path / "store" / ".uploads" / "left.tmp"
        left.write_bytes(one.read_bytes()[:-7])

        rewritten = log.erase_key(TOPIC, KEY, now=True)

        assert [(remnant.place, remnant.command) for remnant in rewritten.remains] == [(str(left), f"rm {left}")]


@pytest.mark.parametrize("mode", MODES)
def test_records_below_a_floor_count_as_long_as_their_bytes_lie_there(mode: str, tmp_path: Path) -> None:
    environment = environment_of(mode, tmp_path)
    with environment.open("one") as log:
        topic = filled(log)
        topic.delete_before(topic.offsets().next, 0)

        asked = log.erase_key(TOPIC, KEY)
        rewritten = log.erase_key(TOPIC, KEY, now=True)

        assert asked.deleted == 0 and asked.remains
        assert rewritten.remains == () and holders(SECRET, tmp_path) == set()
        topic.append(b"later")
        assert [value for _, _, value in live(topic)] == [b"later"]


@pytest.mark.parametrize("code", [errno.EBADF, errno.ESTALE, errno.ENOENT])
def test_a_file_that_is_sealed_during_the_search_is_searched_again(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, failing = SegmentErasure.local_files, [OSError(code, "this handle is closed")]

    def replaced(erasure: SegmentErasure, sought: Sought) -> list[LogFile | SealedFile]:
        if failing:
            raise failing.pop()
        return files(erasure, sought)

    with environment_of("local", tmp_path).open("one") as log:
        filled(log)
        monkeypatch.setattr(SegmentErasure, "local_files", replaced)
        assert log.erase_key(TOPIC, KEY).remains
    assert not failing


def test_what_is_appended_later_is_no_part_of_it(tmp_path: Path) -> None:
    environment = environment_of("local", tmp_path)
    with environment.open("one") as log:
        topic = filled(log)
        log.erase_key(TOPIC, KEY, now=True)
        offset = topic.append(b"again", key=KEY)
        topic.rotate()

        assert [record.offset for record in topic.read_by_key(KEY)] == [offset]
        assert log.erase_key(TOPIC, KEY).deleted == 1


class CutShort(Exception):
    """Everything ends here."""


class Cuts:
    """Ends the process at the n-th step that changes something, as a power cut would: no later step is done."""

    def __init__(self, patch: pytest.MonkeyPatch, log: Storage, at: int) -> None:
        self.left = at
        self.is_cut = False
        metadata = metadata_of(log)
        places = inside(log).places
        for name in ("upload", "delete"):
            for kind in {type(store) for store in places.stores}:
                self._interpose(patch, kind, name)
        for name in ("unlink", "rename"):
            self._interpose(patch, SystemDisk, name)
        self._interpose(patch, type(metadata), "transaction")

    def _interpose(self, patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        whole: Callable[..., object] = getattr(owner, name)

        def step(*args: object, **kwargs: object) -> object:
            if self.left == 0 or self.is_cut:
                self.is_cut = True
                raise CutShort
            self.left -= 1
            return whole(*args, **kwargs)

        patch.setattr(owner, name, step)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_a_rewriting_that_is_cut_short_anywhere_loses_nothing_and_is_finished_by_the_next(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    at, is_cut, step = 0, True, 1 if SOAK else 4
    while is_cut:
        root = tmp_path / str(at)
        environment = environment_of(mode, root)
        root.mkdir()
        log = environment.open("one")
        before = live(filled(log, rounds=3))
        log.erase_key(TOPIC, KEY)
        with monkeypatch.context() as patch:
            cuts = Cuts(patch, log, at)
            with contextlib.suppress(CutShort, ForebayError, OSError):
                log.erase_key(TOPIC, KEY, now=True)
            is_cut = cuts.is_cut
        log.close()

        with environment.open("one") as log:
            topic = log.topic(TOPIC)
            assert live(topic) == others(before), f"cut at step {at}"
            asked = log.erase_key(TOPIC, KEY)
            assert places_of(asked, environment) >= holders(SECRET, root), f"cut at step {at}"
            rewritten = log.erase_key(TOPIC, KEY, now=True)
            assert all("upload" in remnant.until for remnant in rewritten.remains), f"cut at step {at}"
            for command in rewritten.commands:
                Path(shlex.split(command.removeprefix("rm "))[0]).unlink()
            assert log.erase_key(TOPIC, KEY).remains == (), f"cut at step {at}"
            assert holders(SECRET, root) | holders(KEY, root) == set(), f"cut at step {at}"
            assert live(topic) == others(before), f"cut at step {at}"
        check_sound(environment)
        ledger.count("rewritings cut short", mode=mode)
        at += step
    assert at > 5


@contextlib.contextmanager
def inside_the_write(patch: pytest.MonkeyPatch, act: Callable[[], object]) -> Iterator[None]:
    """Act once, when a rewriting has written its first new segment and has not yet put it in its place."""
    done: list[bool] = []

    def gated(
        task: Merge, ended: OffsetSet, sources: Places, target: SegmentTarget, *, token: str, window: ProducerWindow
    ) -> object:
        made = merge(task, ended, sources, target, token=token, window=window)
        if not done:
            done.append(True)
            act()
        return made

    with patch.context() as inner:
        inner.setattr(forebay.storage.erasure.segments, "merge", gated)
        yield
    assert done, "there was nothing to write"


@pytest.mark.parametrize("mode", MODES)
def test_deletes_and_appends_that_land_inside_a_rewriting_hold(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = environment_of(mode, tmp_path)
    with environment.open("one") as log:
        topic = filled(log)
        before = others(live(topic))
        gone = [offset for _, offset, value in before if value is not None and value.startswith(b"0-")]

        def act() -> None:
            for offset in gone:
                topic.delete_by_offset(offset, offset + 1, 0)
            topic.append(b"meanwhile", key=KEY)

        with inside_the_write(monkeypatch, act):
            rewritten = log.erase_key(TOPIC, KEY, now=True)

        wanted = [record for record in before if record[1] not in gone]
        assert rewritten.remains == ()
        assert live(topic)[:-1] == wanted and live(topic)[-1][2] == b"meanwhile"
    check_sound(environment)
    with environment.open("one") as log:
        assert live(log.topic(TOPIC))[:-1] == wanted


@pytest.mark.parametrize("mode", MODES)
def test_readers_that_stand_in_what_is_rewritten_go_on(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = environment_of(mode, tmp_path)
    with environment.open("one") as log, environment.open("one", read_only=True) as beside:
        topic = filled(log)
        wanted = others(live(topic))
        handles = [topic, beside.topic(TOPIC)]
        streams: list[Iterator[Record]] = [iter(handle.read()) for handle in handles]
        seen = [[next(stream)] for stream in streams]

        log.erase_key(TOPIC, KEY, now=True)

        for begun, stream in zip(seen, streams, strict=True):
            values = [(record.partition, record.offset, record.value) for record in [*begun, *stream]]
            assert others(values) == wanted
        assert [live(handle) for handle in handles] == [wanted, wanted]


def test_a_compaction_by_another_process_is_waited_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forebay.storage.erasure.segments, "LEASE_WAIT_SECONDS", 0.0)
    environment = environment_of("shared_fs", tmp_path)
    with environment.open("one") as log:
        filled(log)
        metadata = metadata_of(log)
        session = metadata.session(60)
        shard = inside(log.topic(TOPIC)).segment(0)
        key = shard.history.catalog.keys.compactor
        metadata.transaction([], [Put(key, b"another", session.id)])

        with pytest.raises(Unavailable, match="waits for another"):
            log.erase_key(TOPIC, KEY, now=True)
        assert log.erase_key(TOPIC, KEY).remains

        session.close()
        assert log.erase_key(TOPIC, KEY, now=True).remains == ()


def test_partitions_that_another_process_has_are_named(tmp_path: Path) -> None:
    environment = environment_of("shared_fs", tmp_path)
    with environment.open("one") as log, environment.open("two") as other:
        topic = log.create_topic(TOPIC, partitions=2)
        topic.append(SECRET, key=KEY, partition=0)
        other.topic(TOPIC).append(SECRET, key=KEY, partition=1)

        erased = log.erase_key(TOPIC, KEY, now=True)

        assert (erased.deleted, [(one.partition, one.tier) for one in erased.remains]) == (1, [(1, "elsewhere")])
        assert str(tmp_path / "two") in erased.remains[0].place
        assert other.erase_key(TOPIC, KEY, now=True).deleted == 1
        assert holders(SECRET, tmp_path) == set()


def test_topics_that_may_have_copies_are_named(tmp_path: Path) -> None:
    from forebay.routers import Routers  # noqa: PLC0415 - no other test here needs them

    environment = environment_of("local", tmp_path)
    with environment.open("one") as log:
        topic = log.create_topic(TOPIC)
        log.create_topic("shop/eu")
        topic.subscribe("billing", deliveries_max=1, on_spent="dead_letter", dead_letter_topic="shop/dead")
        log.topic("shop/eu").subscribe("late", deliveries_max=1, on_spent="dead_letter", dead_letter_topic="shop/later")
        routers = Routers(log)
        routers.create("split", sources=[TOPIC], destination="shop/eu")
        copies = log.erase_key(TOPIC, KEY).copies

    assert {copy.topic for copy in copies} == {"shop/eu", "shop/dead", "shop/later"}
    assert {copy.command for copy in copies if copy.topic == "shop/eu"} == {
        f"forebay records erase shop/eu --key {KEY.decode()} --yes"
    }


def test_the_database_of_rocksdb_is_purged(tmp_path: Path) -> None:
    environment = environment_of("local", tmp_path)
    with environment.open("one") as log:
        topic = log.create_topic(TOPIC, engine="rocksdb")
        topic.append_many([SECRET, b"kept"], keys=[KEY, b"bob"])
    with environment.open("one") as log:
        topic = log.topic(TOPIC)
        asked = [log.erase_key(TOPIC, KEY) for _ in range(2)]
        assert [(one.deleted, len(one.remains)) for one in asked] == [(1, 1), (0, 1)]
        rewritten = log.erase_key(TOPIC, KEY, now=True)
        assert [Path(one.place).name.partition("-")[0] for one in rewritten.remains] in ([], ["MANIFEST"])
        assert [value for _, _, value in live(topic)] == [b"kept"]
    with environment.open("one") as log:
        assert log.erase_key(TOPIC, KEY, now=True).remains == ()
    assert holders(SECRET, tmp_path / "one") | holders(KEY, tmp_path / "one") == set()


def test_nothing_remains_of_a_topic_in_memory(tmp_path: Path) -> None:
    with environment_of("local", tmp_path).open("one") as log:
        log.create_topic(TOPIC, engine="memory").append(SECRET, key=KEY)
        erased = log.erase_key(TOPIC, KEY)
        assert (erased.deleted, erased.remains) == (1, ())
        with pytest.raises(Invalid):
            log.erase_key(TOPIC, "anna")  # type: ignore[arg-type]


def test_a_key_of_a_topic_without_records_is_erased_too(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log:
        log.create_topic(TOPIC)
        for _ in range(2):
            erased = log.erase_key(TOPIC, KEY, now=True)
            assert (erased.deleted, erased.remains) == (0, ())
