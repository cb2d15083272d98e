"""Mending one copy of history from the other may be cut short anywhere; loads and manifests are examined too."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import pytest

from forebay import manifests
from forebay.blobs import DirectoryStore
from forebay.catalog import ShardCatalog
from forebay.directory import FORMAT, LogDirectory, Marker
from forebay.disk import Disk, replace_file
from forebay.errors import Unavailable
from forebay.format.columns.rows import Columns, encode_columns
from forebay.format.files.segment import index_name
from forebay.format.index.sections import decode_index, encode_index
from forebay.inspection.directory import ExpectedShard
from forebay.inspection.history.catalog import HistoryPlaces
from forebay.inspection.repair import repair_shard
from forebay.inspection.repair.history import HistoryMending
from forebay.inspection.steps import CHANGES, Step
from forebay.inspection.verify.shard import verify_shard
from forebay.loads.prepare import LoadPlace, descriptors_of, manifest_of, write_segment
from forebay.metadata import Put
from forebay.places import Stores
from forebay.settings import Settings, StorageSettings
from forebay.testing.checks.invariants import names_follow_bytes
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.crashes import explore
from forebay.testing.simulated.faults import Match
from forebay.topics import TopicName, TopicSpec
from tests.ledger import Ledger
from tests.support.environments.shard import DIRECTORY, KEYS, SETTINGS, TOPIC, ShardEnvironment
from tests.support.soak import SOAK

pytestmark = pytest.mark.slow

ANYWHERE: Final = Settings(storage=StorageSettings(handoff_root="/store"))
SPEC: Final = TopicSpec.create(TopicName("shop", "orders"), topic_id=TOPIC, created_at=0, durability="fsync")
LOCAL: Final = f"{DIRECTORY}/{20:020d}-00000001.seg"
STRIDE: Final = 1 if SOAK else 7
PLACE: Final = ExpectedShard(f"{TOPIC}_0", "shop/orders[0]", DIRECTORY, SPEC, 0)


def _environment(*, seed: int = 1) -> ShardEnvironment:
    """Three exported files and an active one, closed in order; another seed gives the same records in other bytes."""
    environment = ShardEnvironment(clock=ManualClock(seed=seed))
    for _ in range(3):
        environment.append(20)
        environment.seal()
    environment.append(5)
    environment.export()
    environment.shard.upkeep.close()
    environment.disk.sync_filesystem("/data")
    return environment


@contextlib.contextmanager
def _history(environment: ShardEnvironment, disk: Disk) -> Iterator[HistoryPlaces]:
    stores = Stores(LogDirectory("/data", Marker(FORMAT, "me"), None), ANYWHERE, disk=disk, clock=environment.clock)
    with contextlib.closing(stores):
        found = HistoryPlaces.of(PLACE, environment.metadata, stores, KEYS.prefix)
        assert found is not None
        yield found


def _repair(environment: ShardEnvironment, disk: Disk) -> list[Step]:
    with _history(environment, disk) as history:
        return repair_shard(PLACE, SETTINGS, disk=disk, clock=environment.clock, apply=True, history=history)


def _wrong(environment: ShardEnvironment, disk: Disk) -> list[str]:
    with _history(environment, disk) as history:
        report = verify_shard(disk, PLACE, None, owned=False, history=history)
    return [] if report.is_clean else [str(finding) for finding in report.findings]


def _flip(disk: Disk, path: str) -> None:
    file = disk.open(path, writable=True)
    file.write_at(bytes([file.read_at(1, 150)[0] ^ 0x10]), 150)
    file.sync()
    file.close()


def _content(disk: Disk) -> dict[str, bytes]:
    """Segments and indexes on both sides."""
    found = {}
    for folder in (DIRECTORY, f"/store/{TOPIC}_0"):
        for name in disk.list_directory(folder):
            if name.endswith((".seg", ".idx")):
                with contextlib.closing(disk.open(f"{folder}/{name}")) as file:
                    found[f"{folder}/{name}"] = file.read_at(file.size(), 0)
    return found


def _flip_both(disk: Disk, path: str) -> None:
    _flip(disk, path)
    _flip(disk, index_name(path))


def _lose(disk: Disk, path: str) -> None:
    disk.unlink(path)


HARMS: Final[list[Callable[[Disk, str], None]]] = [_flip, _flip_both, _lose]


@pytest.mark.parametrize("side", ["local", "remote"])
@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__.strip("_"))
def test_a_mending_cut_short_anywhere_is_finished_by_the_next(
    harm: Callable[[Disk, str], None], side: str, ledger: Ledger
) -> None:
    environment = _environment()
    sound = _content(environment.disk)
    harm(environment.disk, LOCAL if side == "local" else f"/store/{environment.catalog().descriptors()[1].object_key}")
    environment.disk.sync_filesystem("/data")
    begun = len(environment.disk.trace)
    assert any(step.done for step in _repair(environment, environment.disk))
    assert list(names_follow_bytes(environment.disk.trace)) == []

    for state in explore(
        environment.disk.trace, range(begun, len(environment.disk.trace) + 1), states_max=3, names_max=4
    ):
        disk = state.disk()
        steps = _repair(environment, disk)
        ledger.count("interrupted mendings", side=side)

        assert all(step.action in CHANGES or step.action == "leave" for step in steps), str(state)
        assert _wrong(environment, disk) == [], str(state)
        assert _content(disk) == sound, str(state)
        assert not any(step.action in CHANGES for step in _repair(environment, disk))


def _harmed() -> ShardEnvironment:
    """One piece is damaged here, another is missing in the store."""
    environment = _environment()
    _flip(environment.disk, LOCAL)
    environment.disk.unlink(f"/store/{environment.catalog().descriptors()[2].object_key}")
    return environment


def test_a_disk_that_fails_while_mending_leaves_both_sides_as_sound_as_they_were(ledger: Ledger) -> None:
    sound = _content(_environment().disk)
    whole = _harmed()
    begun = whole.disk.calls_reached
    _repair(whole, whole.disk)
    for call in range(begun, whole.disk.calls_reached, STRIDE):
        environment = _harmed()
        environment.disk.fail_when(_from(call), errno.EIO, times=None)
        with contextlib.suppress(OSError):
            _repair(environment, environment.disk)
        environment.disk.heal()

        _repair(environment, environment.disk)

        assert _content(environment.disk) == sound and _wrong(environment, environment.disk) == []
        ledger.count("mendings on a failing disk")


def _from(first: int) -> Match:
    return lambda call: call.index >= first


def test_an_object_that_is_harmed_after_it_was_examined_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = _environment()
    _flip(environment.disk, LOCAL)
    harmed = _content(environment.disk)
    remote = f"/store/{environment.catalog().descriptors()[1].object_key}"
    examined = HistoryMending.plan

    def harm(mending: HistoryMending) -> Iterator[Any]:
        plan = list(examined(mending))
        _flip(environment.disk, remote)
        return iter(plan)

    monkeypatch.setattr(HistoryMending, "plan", harm)
    with _history(environment, environment.disk) as history:
        steps = HistoryMending(PLACE, history, disk=environment.disk, on_bytes=None).run(apply=True).steps
    _flip(environment.disk, remote)

    assert [step.action for step in steps] == ["cannot repair"] and "not what was catalogued" in steps[0].why
    assert _content(environment.disk) == harmed


def test_two_whole_copies_that_differ_are_left_to_a_person() -> None:
    environment, other = _environment(), _environment(seed=2)
    for path in (LOCAL, index_name(LOCAL)):
        with contextlib.closing(other.disk.open(path)) as file:
            replace_file(environment.disk, path, file.read_at(file.size(), 0))
    before = _content(environment.disk)

    (wrong,) = _wrong(environment, environment.disk)
    (step,) = _repair(environment, environment.disk)

    assert "differs from" in wrong and "offsets [20, 40)" in wrong
    assert step.action == "cannot repair" and step.offsets == (20, 40)
    assert _content(environment.disk) == before


def test_a_damaged_file_whose_index_speaks_of_other_content_is_left_to_a_person() -> None:
    environment, other = _environment(), _environment(seed=2)
    with contextlib.closing(other.disk.open(index_name(LOCAL))) as file:
        replace_file(environment.disk, index_name(LOCAL), file.read_at(file.size(), 0))
    _flip(environment.disk, LOCAL)
    before = _content(environment.disk)

    steps = _repair(environment, environment.disk)

    assert {step.action for step in steps} == {"cannot repair"} and "other content" in steps[0].why
    assert _content(environment.disk) == before


def test_an_index_object_that_is_whole_and_does_not_fit_is_rebuilt() -> None:
    environment = _environment()
    sound = _content(environment.disk)
    path = f"/store/{index_name(environment.catalog().descriptors()[1].object_key)}"
    decoded = decode_index(sound[path])
    assert isinstance(decoded, tuple)
    footer, entries, gaps = decoded
    entries = entries.copy()
    entries["time_max"][0] += 1
    replace_file(environment.disk, path, encode_index(footer, entries, gaps))

    (wrong,) = _wrong(environment, environment.disk)
    _repair(environment, environment.disk)

    assert "does not fit" in wrong and "forebay repair" in wrong
    assert _content(environment.disk) == sound


@pytest.mark.parametrize("attached", [True, False])
def test_what_the_log_leaves_to_the_history_must_be_there(*, attached: bool) -> None:
    environment = ShardEnvironment()
    environment.append(20)
    environment.seal()
    environment.export()
    if attached:
        _loaded(environment)
    environment.shard.wal.skip_to_history(34)
    environment.append(5)
    environment.shard.upkeep.close()

    wrong = _wrong(environment, environment.disk)

    assert [("offsets [20, 34)" in what and "leaves these offsets" in what) for what in wrong] == [True] * (
        not attached
    )


def _loaded(environment: ShardEnvironment) -> None:
    """A bulk load of two segments at the end of history, at other offsets than its bytes say."""
    place = LoadPlace("load", TOPIC, 0)
    segments = []
    for token in ("a", "b"):
        columns = encode_columns(Columns(values=[b"load %s" % token.encode()] * 7, timestamps=[5] * 7))
        segment = write_segment(environment.store, place, token, [columns], clock=environment.clock)
        assert segment is not None
        segments.append((0, segment))
    start = environment.catalog().frontier().next
    manifest = manifest_of("load", TOPIC, segments)
    environment.catalog().extend(
        1, descriptors_of(manifest, 0, start, epoch=1, store="directory", leader="me", created_at=0)
    )


def test_segments_of_a_load_are_examined_at_the_offsets_they_were_given() -> None:
    environment = _environment()
    _loaded(environment)
    assert _wrong(environment, environment.disk) == []
    loaded = environment.catalog().descriptors()[-1]
    path = f"/store/{index_name(loaded.object_key)}"
    with contextlib.closing(environment.disk.open(path)) as file:
        index = file.read_at(file.size(), 0)
    environment.disk.unlink(path)

    assert any("index object is missing" in what for what in _wrong(environment, environment.disk))
    _repair(environment, environment.disk)
    assert _wrong(environment, environment.disk) == []
    with contextlib.closing(environment.disk.open(path)) as file:
        assert file.read_at(file.size(), 0) == index

    _flip(environment.disk, f"/store/{loaded.object_key}")
    assert any("[67, 74)" in what and "backup" in what for what in _wrong(environment, environment.disk))
    assert [step.action for step in _repair(environment, environment.disk)] == ["cannot repair"]


def _listed(environment: ShardEnvironment, **changes: object) -> str:
    """The first two pieces, with these changes, as one manifest; its object."""
    pieces = environment.catalog().pieces()[:2]
    manifest = manifests.write(
        environment.store,
        f"{TOPIC}_0/",
        [msgspec.structs.replace(piece.descriptor, **changes) for piece in pieces],
        store_name="directory",
        created_at=0,
    )
    assert environment.catalog().replace(pieces, msgspec.structs.replace(manifest, load_id="of a load"))
    return f"/store/{manifest.object_key}"


def test_what_a_manifest_lists_is_examined_and_mended_too() -> None:
    environment = _environment()
    listed = f"/store/{environment.catalog().descriptors()[1].object_key}"
    manifest = _listed(environment)
    sound = _content(environment.disk)
    assert _wrong(environment, environment.disk) == []

    environment.disk.unlink(listed)
    assert any("[20, 40)" in what and "forebay repair" in what for what in _wrong(environment, environment.disk))
    _repair(environment, environment.disk)
    assert _wrong(environment, environment.disk) == [] and _content(environment.disk) == sound

    _flip(environment.disk, manifest)
    assert any("[0, 40)" in what for what in _wrong(environment, environment.disk))
    assert any(
        step.offsets == (0, 40) and step.action == "cannot repair" for step in _repair(environment, environment.disk)
    )


@pytest.mark.parametrize("lost", [False, True])
def test_other_etags_of_what_a_manifest_lists_are_recorded_by_another_manifest(
    monkeypatch: pytest.MonkeyPatch, *, lost: bool
) -> None:
    environment = _environment()
    before = environment.catalog().descriptors()
    _listed(environment, etag="another")
    if lost:
        environment.disk.unlink(f"/store/{before[1].object_key}")
    with monkeypatch.context() as patched:
        patched.setattr(ShardCatalog, "replace", lambda *_: False)
        refused = [step.why for step in _repair(environment, environment.disk) if step.action == "cannot repair"]
        assert len(refused) == 1 and "run it again" in refused[0]
    assert any("etag" in what for what in _wrong(environment, environment.disk))

    assert all(step.done for step in _repair(environment, environment.disk))

    assert _wrong(environment, environment.disk) == [] and _repair(environment, environment.disk) == []
    reader = manifests.ManifestReader(environment.store)
    assert ShardCatalog(environment.metadata, KEYS, TOPIC, reader, clock=ManualClock()).descriptors() == before
    assert [piece.descriptor.load_id for piece in environment.catalog().pieces()] == ["of a load", None]


def _listed_each(environment: ShardEnvironment) -> list[str]:
    """Each of the first two pieces by a manifest of its own, the first with another etag; their objects."""
    objects = []
    for piece, etag in zip(environment.catalog().pieces()[:2], ("another", None), strict=True):
        named = msgspec.structs.replace(piece.descriptor, etag=etag or piece.descriptor.etag)
        manifest = manifests.write(environment.store, f"{TOPIC}_0/", [named], store_name="directory", created_at=0)
        assert environment.catalog().replace([piece], manifest)
        objects.append(f"/store/{manifest.object_key}")
    return objects


def test_a_manifest_that_lists_nothing_new_is_not_looked_into_for_that() -> None:
    environment = _environment()
    _, other = _listed_each(environment)
    _flip(environment.disk, other)

    steps = _repair(environment, environment.disk)

    assert [step.done for step in steps if step.offsets == (0, 20)] == [True]
    assert not any("etags" in step.why for step in steps)
    assert not any("[0, 20)" in what for what in _wrong(environment, environment.disk))


def test_an_entry_of_the_catalog_that_cannot_be_read_keeps_no_other_step_from_being_taken() -> None:
    environment = _environment()
    _listed(environment, etag="another")
    environment.metadata.transaction([], [Put(KEYS.segment(40), b"no descriptor")])
    index = index_name(LOCAL)
    environment.disk.unlink(index)

    steps = _repair(environment, environment.disk)

    assert any(step.action == "cannot repair" and "etags" in step.why for step in steps)
    assert environment.disk.exists(index)


def test_a_store_that_stops_answering_is_said_and_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = _environment()
    asked: list[str] = []

    def refuse(_: DirectoryStore, key: str) -> None:
        asked.append(key)
        raise Unavailable("the store is on holiday")

    monkeypatch.setattr(DirectoryStore, "stat", refuse)

    wrong = _wrong(environment, environment.disk)

    assert len(asked) == 1
    assert [("3 objects: cannot be checked" in what and "offsets [0, 60)" in what) for what in wrong] == [True]


def test_a_step_says_what_it_is_about() -> None:
    step = msgspec.convert({"action": "fetch again", "shard": "s[0]", "file": "f", "why": "lost"}, Step)

    assert str(msgspec.structs.replace(step, offsets=(1, 2))) == "fetch again s[0] f offsets [1, 2): lost"
