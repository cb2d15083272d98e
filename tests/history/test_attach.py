"""Prepared segments attached by the owners of their shards: all shards or none, and no caller sees half of it."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import msgspec
import pytest

from forebay.appends.ticket import Ticket
from forebay.catalog import ShardCatalog
from forebay.cleanup.objects import ObjectCleanup
from forebay.definitions import Definitions
from forebay.errors import Conflict, Corrupt, Fenced, Invalid, Moved, Unavailable, UnknownTopic
from forebay.format.columns.rows import encode_rows
from forebay.format.metadata.descriptor import DescriptorKind, LoadStatus
from forebay.loads import attach
from forebay.loads.attach import Attached, Attaching, LoadOver
from forebay.loads.book import LoadBook
from forebay.loads.prepare import LoadManifest
from forebay.places import is_private
from forebay.records import Gap, Reason
from forebay.shard.seal import begin_seal, bring_into_history
from forebay.testing.inside import inside
from forebay.testing.simulated.blobs import SimulatedBlobs
from forebay.testing.simulated.clock import ManualClock
from tests.history.attached import LOAD, LoadEnvironment, LoadOwner, broken, values
from tests.ledger import Ledger
from tests.support.environments.simulated import GRACE_S, NAME, TOPIC_ID

MODES = ("local", "shared_fs")


@pytest.fixture(params=MODES)
def environment(request: pytest.FixtureRequest) -> LoadEnvironment:
    return LoadEnvironment(request.param)


def test_a_load_lies_behind_what_was_appended_and_appends_go_on_behind_it(
    environment: LoadEnvironment, ledger: Ledger
) -> None:
    node = environment.node()
    node.append(count=5)
    brought = {0: values(0, 100)}
    node.offer(brought, per_segment=40)

    progress = node.loads.attach(LOAD)

    assert [part[:3] for part in progress.attached] == [(0, 5, 105)]
    assert (progress.load.status, progress.load.shards[0].start, progress.elsewhere) == ("committed", 5, {})
    assert node.append() == [105]
    assert [(piece.start, piece.end, piece.load_id) for piece in environment.catalog(0).descriptors()] == [
        (0, 5, None),
        (5, 45, LOAD),
        (45, 85, LOAD),
        (85, 105, LOAD),
    ]
    assert {is_private(piece) for piece in environment.catalog(0).descriptors()} == {not environment.settings.is_shared}
    assert broken(environment, node, brought) == []
    state = environment.catalog(0).state()
    assert state is not None
    assert state.state.next_offset == 105
    assert state.state.reserved_end >= 105
    counters = node.shard().wal.counters
    assert (counters.pause_seconds.value().count, node.paused()) == (1, [])
    ledger.count("loads attached", mode=environment.settings.storage.mode)


def test_an_empty_topic_takes_a_load(environment: LoadEnvironment) -> None:
    node = environment.node()
    node.offer({0: values(0, 3)})

    node.loads.attach(LOAD)

    assert node.append() == [3]
    assert broken(environment, node, {0: values(0, 3)}) == []


def test_a_place_inside_of_a_load_is_found_by_offset_and_by_time(environment: LoadEnvironment) -> None:
    node = environment.node()
    node.append(count=5)
    node.offer({0: values(0, 100)}, per_segment=40)
    node.loads.attach(LOAD)
    node.append()

    assert node.stream(start=60)[0] == (60, b"load 0/55")
    assert node.shard().offset_at_time(5_055) == 0, "what was appended is newer"
    history = node.shard().history.segments
    assert history.offset_at_time(0) == 0
    assert [step[0] for step in node.stream(start=84)] == [*range(84, 106)]


def test_attaching_twice_adds_nothing(environment: LoadEnvironment) -> None:
    node = environment.node()
    node.append(count=2)
    brought = {0: values(0, 10)}
    manifest = node.prepare(brought)
    node.loads.offer(str(NAME), manifest, None)
    assert node.loads.attach(LOAD).attached
    before = environment.catalog(0).descriptors()

    assert node.loads.attach(LOAD).attached == []
    node.settle()
    assert node.loads.offer(str(NAME), manifest, None).status == "committed"

    assert environment.catalog(0).descriptors() == before
    assert broken(environment, node, brought) == []


def test_an_id_is_never_used_for_another_load(environment: LoadEnvironment) -> None:
    node = environment.node()
    node.offer({0: values(0, 10)})
    with pytest.raises(Conflict, match="take another id"):
        node.offer({0: values(0, 11)})
    node.loads.abandon(LOAD)
    with pytest.raises(Conflict, match="abandoned"):
        node.offer({0: values(0, 11)})
    assert node.loads.attach(LOAD).attached == []
    assert node.stream() == []


def test_what_does_not_fit_the_topic_is_refused_when_it_is_offered(environment: LoadEnvironment) -> None:
    node = environment.node()
    manifest = node.prepare({0: values(0, 1)})
    with pytest.raises(Conflict, match="partition 3"):
        node.offer({3: values(3, 1)}, "beyond")
    with pytest.raises(Conflict, match="another topic"):
        node.loads.offer(str(NAME), msgspec.structs.replace(manifest, topic_id="cd" * 16), None)
    with pytest.raises(UnknownTopic):
        node.loads.offer("shop/other", manifest, None)
    with pytest.raises(Invalid, match="no name for a load"):
        node.loads.offer(str(NAME), msgspec.structs.replace(manifest, load_id="a/b"), None)
    with pytest.raises(Invalid, match="there is no load"):
        node.loads.attach("unknown")


def test_a_load_whose_objects_are_not_what_was_prepared_is_not_attached() -> None:
    environment = LoadEnvironment(blobs=SimulatedBlobs())
    assert isinstance(environment.blobs, SimulatedBlobs)
    node = environment.node()
    node.append(count=2)
    node.offer({0: values(0, 10)})
    for key in [key for key in environment.blobs.contents if "/loads/" in key and not key.endswith(".manifest")]:
        held = environment.blobs.contents[key]
        environment.blobs.upload(key, [held[:-1]])
        with pytest.raises(Corrupt, match="as it was prepared"):
            node.loads.attach(LOAD)
        environment.blobs.upload(key, [held])
    assert node.append() == [2], "no append waits for it"

    node.settle()
    assert broken(environment, node, {0: values(0, 10)}) == []


def test_many_segments_are_attached_by_one_manifest(
    environment: LoadEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "DESCRIPTORS_MAX", 3)
    node = environment.node()
    node.append(count=2)
    brought = {0: values(0, 40)}
    node.offer(brought, per_segment=10)

    node.loads.attach(LOAD)

    node.append()
    assert [(piece.descriptor.kind, piece.descriptor.load_id) for piece in environment.catalog(0).pieces()] == [
        (DescriptorKind.FRAMES, None),
        (DescriptorKind.MANIFEST, LOAD),
    ]
    assert broken(environment, node, brought) == []
    node.engine.seal_shard(node.engine.open_shard(node.shard().ref), target="b", quiesce=lambda: None)
    other = environment.node("b")
    assert not any(map(is_private, environment.catalog(0).descriptors()))
    assert broken(environment, other, brought) == []


def test_ninety_descriptors_fit_one_transaction(environment: LoadEnvironment) -> None:
    node = environment.node()
    brought = {0: values(0, 90)}
    node.offer(brought, per_segment=1)

    node.loads.attach(LOAD)

    assert [piece.descriptor.kind for piece in environment.catalog(0).pieces()] == [DescriptorKind.FRAMES] * 90
    node.offer({0: values(0, 91)}, "more", per_segment=1)
    node.loads.attach("more")
    assert [piece.descriptor.kind for piece in environment.catalog(0).pieces()][90:] == [DescriptorKind.MANIFEST]


def _two_owners(blobs: SimulatedBlobs | None = None) -> tuple[LoadEnvironment, LoadOwner, LoadOwner]:
    """Of three partitions two are owned by one directory, and one by another."""
    environment = LoadEnvironment(partitions=3, blobs=blobs)
    first, second = environment.node("a"), environment.node("b")
    first.append(0, 3)
    first.append(1)
    second.append(2, 2)
    return environment, first, second


BROUGHT = {partition: values(partition, 10 + partition) for partition in range(3)}


def test_readers_wait_before_a_load_until_all_shards_have_it() -> None:
    environment, first, second = _two_owners()
    first.offer(BROUGHT)

    progress = first.loads.attach(LOAD)

    assert [part.partition for part in progress.attached] == [0, 1]
    assert list(progress.elsewhere) == [2]
    assert progress.load.status is LoadStatus.OFFERED
    assert first.append(0) == [13], "appends do not wait for the other shards"
    assert [step[0] for step in first.stream(0)] == [0, 1, 2]
    assert first.stream(0, start=7) == [], "nor does who begins inside of it see anything"
    shard = first.shard(0)
    assert not shard.wait(3, 0.2)
    assert shard.history.segments.is_waiting(3)
    assert not shard.history.segments.is_waiting(2)

    second.settle()

    assert environment.load().status is LoadStatus.COMMITTED
    assert shard.wait(3, 0)
    assert [part.start for part in environment.load().shards] == [3, 1, 2]
    assert broken(environment, first, BROUGHT, others={2: second}) == []


@pytest.mark.parametrize("moved", [False, True])
def test_readers_wait_before_a_load_though_no_local_file_is_left_of_what_lies_around_it(*, moved: bool) -> None:
    environment, first, second = _two_owners()
    first.offer(BROUGHT)
    first.loads.attach(LOAD)
    for _ in range(3):
        first.append(0)
        bring_into_history(first.shard(0))
    reader = first
    if moved:
        first.engine.seal_shard(first.engine.open_shard(first.shard(0).ref), target="b", quiesce=lambda: None)
        reader = second
    environment.clock.advance(10 * environment.settings.retention.time_s)
    reader.append(0)
    reader.shard(0).history.retain()
    assert reader.shard(0).wal.files.begins == 16

    assert [step[0] for step in reader.stream(0)] == [0, 1, 2]
    assert reader.stream(0, start=7) == []
    assert not reader.shard(0).wait(3, 0)
    second.settle()

    assert broken(environment, reader, BROUGHT, others={1: first, 2: second}) == []


def test_a_time_look_up_never_leads_past_a_load_that_is_not_committed() -> None:
    environment = LoadEnvironment(partitions=2)
    first, second = environment.node("a"), environment.node("b")
    second.append(1)
    first.offer({0: values(0, 10), 1: values(1, 1)})
    first.loads.attach(LOAD)
    assert first.append(0) == [10]
    shard = first.shard(0)

    assert shard.offset_at_time(5_004) == 4, "who begins there waits, and misses nothing"
    assert shard.read(4).next == 4
    assert shard.offset_at_time(5_010) == 10

    LoadBook(environment.inner, "/forebay", ManualClock()).give_up(LOAD)
    assert shard.offset_at_time(5_004) == 10
    second.settle()
    assert shard.offset_at_time(5_004) == 10


def test_a_reader_at_the_end_is_woken_when_the_load_is_committed_elsewhere() -> None:
    environment, first, second = _two_owners()
    woken: list[int] = []
    first.shard(0).wakers.add(lambda: woken.append(environment.load().status is LoadStatus.COMMITTED))
    first.offer(BROUGHT)
    first.loads.step()
    assert woken
    assert not any(woken)

    second.settle()
    assert not any(woken)
    first.loads.step()

    assert woken[-1]


@pytest.mark.parametrize("done", ["nothing", "one owner", "all but the commit"])
def test_a_load_that_is_given_up_leaves_gaps_where_it_was_attached_and_nothing_elsewhere(done: str) -> None:
    environment, first, second = _two_owners()
    first.offer(BROUGHT)
    if done != "nothing":
        first.loads.attach(LOAD)
    if done == "all but the commit":
        with mock.patch.object(LoadBook, "commit", side_effect=Unavailable("not now")), pytest.raises(Unavailable):
            second.loads.attach(LOAD)
        assert len(LoadBook(environment.inner, "/forebay", ManualClock()).attached(LOAD)) == 3

    assert second.loads.abandon(LOAD).status is LoadStatus.ABANDONED

    attached = {"nothing": 0, "one owner": 2, "all but the commit": 3}[done]
    gaps = [piece.gap for partition in range(3) for piece in environment.catalog(partition).descriptors() if piece.gap]
    assert [gap.reason for gap in gaps] == [Reason.SKIPPED] * attached
    assert LoadBook(environment.inner, "/forebay", ManualClock()).pending() == {}
    for node, partition in ((first, 0), (first, 1), (second, 2)):
        node.settle()
        node.append(partition)
    assert first.loads.attach(LOAD).attached == []
    assert broken(environment, first, BROUGHT, others={2: second}) == []
    with pytest.raises(Conflict, match="take another id"):
        first.offer({0: values(0, 1)})


def test_a_committed_load_is_not_given_up() -> None:
    environment, first, second = _two_owners()
    first.offer(BROUGHT)
    first.loads.attach(LOAD)
    second.settle()

    with pytest.raises(Conflict, match="committed"):
        first.loads.abandon(LOAD)
    assert broken(environment, first, BROUGHT, others={2: second}) == []


def test_one_that_was_given_up_before_it_was_offered_never_is() -> None:
    environment = LoadEnvironment()
    node = environment.node()
    manifest = node.prepare({0: values(0, 5)})
    node.loads.abandon(LOAD)

    with pytest.raises(Conflict, match="abandoned"):
        node.loads.offer(str(NAME), manifest, None)


def test_a_load_that_is_not_attached_in_time_is_given_up() -> None:
    environment, first, second = _two_owners()
    expires_at = environment.clock.now_ms() + 60_000
    first.loads.offer(str(NAME), first.prepare(BROUGHT), expires_at)
    first.loads.attach(LOAD)
    environment.clock.advance(61)

    second.settle()

    assert environment.load().status is LoadStatus.ABANDONED
    first.settle()
    assert broken(environment, first, BROUGHT, others={2: second}) == []


def test_whichever_caller_looks_finishes_what_was_given_up_and_left_half_way() -> None:
    environment, first, second = _two_owners()
    first.offer(BROUGHT)
    first.loads.attach(LOAD)
    LoadBook(environment.inner, "/forebay", ManualClock()).give_up(LOAD)
    assert [step for step in first.stream(1) if isinstance(step, Gap)] == [Gap(1, 12, Reason.SKIPPED)]
    assert [piece.load_id for piece in environment.catalog(1).descriptors()] == [None, LOAD]

    second.settle()

    assert [piece.gap for piece in environment.catalog(1).descriptors()] == [None, Gap(1, 12, Reason.SKIPPED)]
    assert LoadBook(environment.inner, "/forebay", ManualClock()).pending() == {}
    assert broken(environment, first, BROUGHT, others={2: second}) == []


def test_an_owner_that_was_replaced_attaches_nothing(ledger: Ledger) -> None:
    environment = LoadEnvironment()
    old = environment.node("a")
    old.append(count=3)
    old.offer({0: values(0, 10)})
    shard = old.shard()
    old.owner_session.session.close()
    new = environment.node("b")
    new.append()
    before = environment.catalog(0).descriptors()

    with pytest.raises(Fenced):
        old.archiving.alone_with(
            shard, lambda shard: inside(old.loads).of(shard).attach(LOAD, old.prepare({0: [b"x"]}))
        )

    assert shard.wal.fenced is not None
    assert environment.catalog(0).descriptors() == before
    assert new.settle().status is LoadStatus.COMMITTED
    assert len([step for step in new.stream() if not isinstance(step, Gap) and step[1] == b"load 0/0"]) == 1
    ledger.count("zombie attaches refused")


def test_a_zombie_at_the_transaction_changes_nothing(monkeypatch: pytest.MonkeyPatch, ledger: Ledger) -> None:
    """It pauses after its last look at who owns the shard."""
    environment = LoadEnvironment()
    old = environment.node("a")
    old.append(count=3)
    old.offer({0: values(0, 10)})
    new: list[LoadOwner] = []
    plain = attach.Attaching.transaction_for

    def overtaken(*arguments: object) -> object:
        made = plain(*arguments)  # type: ignore[arg-type]
        if not new:
            old.owner_session.session.close()
            new.append(environment.node("b"))
            new[0].append()
        return made

    monkeypatch.setattr(attach.Attaching, "transaction_for", overtaken)
    with pytest.raises(Fenced):
        old.loads.attach(LOAD)

    assert not any(piece.load_id for piece in environment.catalog(0).descriptors())
    assert new[0].settle().status is LoadStatus.COMMITTED
    assert broken(environment, new[0], {0: values(0, 10)}) == []
    ledger.count("zombie attaches refused")


def test_a_seal_that_comes_in_between_keeps_appends_out(
    environment: LoadEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = environment.node()
    node.append(count=3)
    node.offer({0: values(0, 10)})
    shard = node.shard()
    plain = attach.Attaching.transaction_for

    def sealed(*arguments: object) -> object:
        begin_seal(shard, inside(node.engine).context(node.owner_session.session), None)
        return plain(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(attach.Attaching, "transaction_for", sealed)
    with pytest.raises(Moved):
        node.loads.attach(LOAD)

    for _ in range(2):
        with pytest.raises(Moved):
            shard.wal.stage_many(encode_rows([(b"late", None, None, (), 0)]), None, Ticket())
        assert not any(piece.load_id for piece in environment.catalog(0).descriptors())
        with pytest.raises(Moved):
            node.loads.attach(LOAD)


def test_what_is_rewritten_in_between_stays_rewritten(
    environment: LoadEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another load is taken out of history just before the transaction."""
    node = environment.node()
    node.offer({0: values(0, 5)}, "other")
    with mock.patch.object(LoadBook, "commit", side_effect=Unavailable("not now")), pytest.raises(Unavailable):
        node.loads.attach("other")
    node.offer({0: values(0, 10)})
    plain = attach.Attaching.transaction_for
    given_up: list[int] = []

    def rewritten(*arguments: object) -> object:
        made = plain(*arguments)  # type: ignore[arg-type]
        if not given_up:
            given_up.append(environment.catalog(0).frontier().cur.generation)
            node.loads.abandon("other")
        return made

    monkeypatch.setattr(attach.Attaching, "transaction_for", rewritten)
    node.loads.attach(LOAD)

    assert environment.catalog(0).frontier().cur.generation == given_up[0] + 1
    assert node.append() == [15]
    assert broken(environment, node, {0: values(0, 10)}) == []


def test_an_attempt_that_comes_late_finds_the_load_attached(environment: LoadEnvironment) -> None:
    node = environment.node()
    brought = {0: values(0, 5)}
    manifest = node.prepare(brought)
    node.loads.offer(str(NAME), manifest, None)
    for expected in (True, False):
        done = node.archiving.alone_with(
            node.shard(), lambda shard: inside(node.loads).of(shard).attach(LOAD, manifest)
        )
        assert (done is not None) is expected
    node.settle()
    assert broken(environment, node, brought) == []


def test_an_owner_that_attaches_what_the_background_has_attached_just_then_learns_so(
    environment: LoadEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = environment.node()
    node.append(count=2)
    brought = {0: values(0, 5)}
    node.offer(brought)
    _before_attaching(monkeypatch, node.loads.step)

    progress = node.loads.attach(LOAD)

    assert (progress.load.status, progress.attached, progress.elsewhere) == (LoadStatus.COMMITTED, [], {})
    assert node.paused() == []
    assert node.append() == [7]
    assert broken(environment, node, brought) == []


def test_an_owner_that_attaches_what_is_given_up_just_then_learns_so(
    environment: LoadEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = environment.node()
    node.append(count=2)
    node.offer({0: values(0, 5)})
    _before_attaching(monkeypatch, lambda: node.loads.abandon(LOAD))

    with pytest.raises(LoadOver, match="never will be"):
        node.loads.attach(LOAD)

    assert node.append() == [2]
    assert broken(environment, node, {}) == []


def _before_attaching(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Do something once, when a shard is about to take its part of a load."""
    attach = Attaching.attach

    def late(attaching: Attaching, load_id: str, manifest: LoadManifest) -> Attached | None:
        monkeypatch.undo()
        work()
        return attach(attaching, load_id, manifest)

    monkeypatch.setattr(Attaching, "attach", late)


def test_a_topic_with_a_load_is_sealed_and_moves(environment: LoadEnvironment) -> None:
    node = environment.node()
    node.append(count=3)
    brought = {0: values(0, 30)}
    node.offer(brought, per_segment=20)
    node.loads.attach(LOAD)
    node.append()

    state = node.engine.seal_shard(node.engine.open_shard(node.shard().ref), target="b", quiesce=lambda: None)
    other = environment.node("b")

    assert state.next_offset == 34
    assert other.append() == [34]
    assert {piece.store for piece in environment.catalog(0).descriptors()} == {"directory"}
    assert {piece.load_id for piece in environment.catalog(0).descriptors()} == {None, LOAD}
    assert broken(environment, other, brought) == []
    environment.clock.jump(2 * GRACE_S * 1000 + 86_400_000 * 2)
    node.collect_directory()
    other.collect_directory()
    assert broken(environment, other, brought) == []
    assert [path for path in environment.files() if path.startswith("/a/loads/") and not path.endswith("/")] == []


@pytest.mark.parametrize("end", ["committed", "abandoned", "never offered"])
def test_objects_of_a_load_go_when_no_caller_needs_them_and_not_before(
    environment: LoadEnvironment, end: str, ledger: Ledger
) -> None:
    node = environment.node()
    node.append(count=3)
    brought = {0: values(0, 30)}
    manifest = node.prepare(brought, per_segment=20)
    node.prepare({0: values(0, 5)})  # an attempt that was given up: no manifest lists it
    old_ms = 2 * max(GRACE_S, environment.settings.export.orphan_grace_s) * 1000

    def kept() -> set[str]:
        return {path for path in environment.files() if f"/loads/{LOAD}/" in path}

    before = kept()
    assert len(before) == 6
    node.collect_directory()
    assert kept() == before, "what is young may be offered yet"
    if end != "never offered":
        node.loads.offer(str(NAME), manifest, None)
        environment.clock.jump(old_ms)
        node.collect_directory()
        # The owner's own sweep finds them below the shard, too.
        node.cleanup.collect_owned(node.shard())
        assert before < kept(), "what is offered is needed, however old"
    if end == "committed":
        node.loads.attach(LOAD)
    if end == "abandoned":
        node.loads.abandon(LOAD)
    environment.clock.jump(old_ms)

    node.collect_directory()

    named = {
        name
        for piece in environment.catalog(0).descriptors()
        for name in (piece.object_key, piece.object_key[:-3] + "idx")
    }
    assert {path.partition("/loads/")[2].rpartition("/")[2] for path in kept()} == (
        {name.rpartition("/")[2] for name in named if "/loads/" in name}
    )
    assert len(kept()) == (4 if end == "committed" else 0)
    if end == "never offered":
        with pytest.raises(Conflict):
            node.loads.offer(str(NAME), manifest, None)
    else:
        assert broken(environment, node, brought) == []
    ledger.count("sweeps of loads", end=end)


def test_a_deleted_topic_leaves_nothing_of_its_loads(environment: LoadEnvironment) -> None:
    node = environment.node()
    node.append()
    node.offer({0: values(0, 10)})
    node.loads.attach(LOAD)
    node.offer({0: values(0, 10)}, "pending")
    definitions = Definitions(environment.metadata, "/forebay", environment.clock)
    definitions.begin_deletion(NAME)

    node.deletions_by(lambda ref: True).finish()

    assert [path for path in environment.files() if TOPIC_ID in path] == []
    # What is known of a load that is over goes by a sweep, which finds that no history names it.
    assert _load_keys(environment) == [f"/forebay/loads/{LOAD}"]
    swept = ObjectCleanup(environment.inner, environment.settings, node.places, environment.clock)
    for _ in range(2):
        environment.clock.jump(2 * environment.settings.export.orphan_grace_s * 1000)
        swept.collect_directory(list, set())
    assert _load_keys(environment) == []
    with pytest.raises(UnknownTopic):
        node.offer({0: values(0, 10)}, "late")


def _load_keys(environment: LoadEnvironment) -> list[str]:
    return [entry.key for entry in environment.inner.range("/forebay/") if "load" in entry.key or "offer" in entry.key]


def test_a_restart_between_attach_and_commit_goes_on(environment: LoadEnvironment) -> None:
    node = environment.node()
    node.append(count=3)
    brought = {0: values(0, 10)}
    node.offer(brought)
    with mock.patch.object(LoadBook, "commit", side_effect=Unavailable("not now")), pytest.raises(Unavailable):
        node.loads.attach(LOAD)
    node.close()

    again = environment.node()
    again.shard()
    assert again.settle().status is LoadStatus.COMMITTED
    assert again.append() == [13]
    assert broken(environment, again, brought) == []


def test_many_loads_that_are_over_are_known_by_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by review: a history asked the metadata store once for each load that it names."""
    environment = LoadEnvironment()
    node = environment.node()
    for number in range(5):
        node.offer({0: values(0, 3)}, f"load{number}")
        node.loads.attach(f"load{number}")
    node.append(0)
    node.close()
    asked: list[str] = []
    status = ShardCatalog.load_status

    def noted(catalog: ShardCatalog, load_id: str) -> LoadStatus:
        asked.append(load_id)
        return status(catalog, load_id)

    monkeypatch.setattr(ShardCatalog, "load_status", noted)
    again = environment.node()

    assert len([step for step in again.stream() if not isinstance(step, Gap)]) == 16
    assert asked == []
