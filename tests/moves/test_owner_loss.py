"""Loss needs a yes: what a directory has not exported waits for it, unless the topic or an operator gives it up."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import pytest

import forebay
from forebay import Invalid, Moved, Unavailable, Unsupported
from forebay.records import Gap, Reason
from forebay.settings import ExportSettings
from forebay.storage import Storage, Topic
from forebay.storage.background import cleanup
from forebay.testing.inside import inside
from tests.support.environments import directories
from tests.support.environments.directories import TOPIC, Environment, id_of, metadata_of, numbers, state_of, told

pytestmark = pytest.mark.slow

SOURCE: Final = Path(forebay.__file__).parent
NO_EXPORT: Final = ExportSettings(at_close_seconds_max=0, interval_s=600)
"""A log that is closed leaves its tail where it is, as one that dies does."""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """Two directories with common history; directory A exports only what a test asks for."""
    monkeypatch.setattr(cleanup, "LOOK_SECONDS", 600.0)
    return directories.shared_fs(tmp_path, export=NO_EXPORT)


def _left(environment: Environment, **options: object) -> None:
    """A topic of ten records; directory A has exported four of them, and is gone."""
    with environment.open("A") as a:
        topic = a.create_topic(TOPIC, durability="fsync", **options)  # type: ignore[arg-type]
        topic.append_many([b"%d" % number for number in range(4)])
        a.export_topic(TOPIC)
        topic.append_many([b"%d" % number for number in range(4, 10)])


def _at_rest(log: Storage) -> list[bytes]:
    """Everything that is stored of the shard."""
    return [entry.value for entry in metadata_of(log).range("/forebay/storage/")]


@pytest.mark.proves("I41")
def test_an_append_elsewhere_is_refused_and_the_owner_comes_back_to_all_of_its_records(
    environment: Environment,
) -> None:
    _left(environment)

    with environment.open("B") as b:
        topic, before = b.topic(TOPIC), _at_rest(b)
        with pytest.raises(Unavailable) as refused:
            topic.append(b"lost?")
        assert _at_rest(b) == before
        # History is read on.
        assert told(topic.read()) == numbers(0, 4) and topic.offsets().next == 4

    for words in (f"{environment.root}/A", "[4, 10)", f"forebay shard take-over {TOPIC}[0] --accept-loss"):
        assert words in str(refused.value)
    assert type(refused.value) is Unavailable
    with environment.open("A") as a:
        topic = a.topic(TOPIC)
        assert topic.append(b"10") == 10
        assert told(topic.read()) == numbers(0, 11)
        assert topic.recovery().exact


def _subscribed(log: Storage, topic: Topic) -> None:
    with topic.subscription("s").consumer() as consumer:
        consumer.take(1, wait_s=0)


WRITES: Final[dict[str, Callable[[Storage, Topic], object]]] = {
    "append": lambda log, topic: topic.append(b"x"),
    "append_many": lambda log, topic: topic.append_many([b"x", b"y"]),
    "append_nowait": lambda log, topic: topic.append_nowait(b"x").result(30),
    "acquire": lambda log, topic: topic.acquire(),
    "take_over": lambda log, topic: log.take_over(TOPIC),
    "seal_topic": lambda log, topic: log.seal_topic(TOPIC),
    "delete_by_offset": lambda log, topic: topic.delete_by_offset(0, 2),
    "delete_by_key": lambda log, topic: topic.delete_by_key(b"k"),
    "delete_before": lambda log, topic: topic.delete_before(2),
    "copy_topic": lambda log, topic: log.copy_topic("shop/source", TOPIC),
    "attach": _subscribed,
}
"""Every call that acquires."""
LOOKS: Final[dict[str, Callable[[Storage, Topic], object]]] = {
    "run_retention": lambda log, topic: log.run_retention(TOPIC),
    "recover": lambda log, topic: log.recover(),
    "clear_moved": lambda log, topic: directories.clear_up(log),
    "offsets": lambda log, topic: topic.offsets(),
    "read": lambda log, topic: list(topic.read()),
    "alter_topic": lambda log, topic: log.alter_topic(TOPIC, ttl_ms=10**9, allow_loss=True),
    "dead_letters": lambda log, topic: list(topic.dead_letters().letters()),
}
"""Some that do not, and need no yes."""


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.proves("I41")
def test_no_write_takes_a_partition_over_unasked(environment: Environment, write: str) -> None:
    with environment.open("B") as b:
        b.create_topic("shop/source").append(b"from another topic")
        _left(environment)
        topic, before = b.topic(TOPIC), _at_rest(b)
        if write == "attach":
            topic.subscribe("s", start=forebay.EARLIEST)
            before = _at_rest(b)

        with pytest.raises(Unavailable, match=r"waits for directory .*A .*\[4, 10\)"):
            WRITES[write](b, topic)

        assert _at_rest(b) == before


@pytest.mark.parametrize("look", LOOKS)
def test_what_only_looks_neither_takes_over_nor_fails(environment: Environment, look: str) -> None:
    _left(environment)
    with environment.open("B") as b:
        topic, before = b.topic(TOPIC), _at_rest(b)

        LOOKS[look](b, topic)

        assert _at_rest(b) == before


def _callers(called: str) -> set[str]:
    """The modules in which a call of this name stands."""
    rooms = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in SOURCE.rglob("*.py")}
    call = re.compile(rf"(?<!def )(?<![\w\"`]){called}\(")
    return {
        room
        for room, path in rooms.items()
        if not room.startswith("testing") and any(call.search(line) for line in path.read_text().splitlines())
    }


def test_only_these_modules_acquire() -> None:
    """The gate stands in `acquire`. A new caller of it, or of what owns a shard, is to be tried above."""
    engines = {"engines.memory", "engines.rocksdb.engine", "engines.segment"}
    assert _callers("(?<!\\.)acquire") == engines
    assert _callers("_acquire_batch") == {"shard.ownership"}
    assert _callers("(_?shards\\.|self\\._?)own") == {
        "loads.service",
        "sealed",  # a file handle of its own
        "storage.append",
        "storage.in_memory",
        "storage.moves",
        "storage.read_only",
        "storage.shards",
        "storage.topic",
    }


@pytest.mark.proves("I41")
def test_a_topic_that_says_so_is_taken_over_and_the_loss_is_recorded(environment: Environment) -> None:
    _left(environment, on_owner_loss="take_over")

    gaps: list[Gap] = []
    with environment.open("B") as b:
        topic = b.topic(TOPIC)
        began = topic.append(b"on")
        records = told(topic.read(on_gap=lambda partition, gap: gaps.append(gap)))
        [loss] = state_of(b, topic).losses

    assert began == 10 and records == [*numbers(0, 4), (10, b"on")]
    assert gaps == [Gap(4, 10, Reason.LOST)]
    assert (loss.start, loss.stop, loss.by) == (4, 10, 'on_owner_loss "take_over"') and loss.at > 0


def test_a_topic_may_say_so_later(environment: Environment) -> None:
    _left(environment)
    with environment.open("B") as b:
        topic = b.topic(TOPIC)
        with pytest.raises(Unavailable):
            topic.append(b"on")

        b.alter_topic(TOPIC, on_owner_loss="take_over")

        assert topic.append(b"on") == 10


@pytest.mark.proves("I41")
def test_an_accepted_loss_is_recorded_with_who_when_and_what(environment: Environment) -> None:
    _left(environment)

    with environment.open("A", export=NO_EXPORT) as a:
        before, holder = state_of(a, a.topic(TOPIC)), id_of(a)
    with environment.open("B") as b:
        state = b.take_over(TOPIC, 0, accept_loss=True, by="anna@north")
        topic = b.topic(TOPIC)
        assert topic.append(b"on") == 10
        with environment.open("A") as a, pytest.raises(Moved):
            a.topic(TOPIC).append(b"late")
        b.seal_topic(TOPIC)
        kept = state_of(b, topic)

    [loss] = state.losses
    assert msgspec.structs.replace(loss, at=0) == msgspec.structs.replace(
        loss, start=4, stop=10, holder=holder, epoch=before.epoch, by="anna@north", at=0
    )
    # Owners that follow keep it.
    assert kept.losses == (loss,)


def test_a_yes_is_for_what_was_at_risk_when_it_was_given(environment: Environment) -> None:
    """The owner comes back after a yes elsewhere was refused, appends, and dies again: that needs a yes of its own."""
    _left(environment)
    with environment.open("B") as b:
        with environment.open("A") as a:
            assert a.topic(TOPIC).append(b"10") == 10
            with pytest.raises(Moved, match="owned by the living session"):
                b.take_over(TOPIC, accept_loss=True)
        with pytest.raises(Unavailable, match=r"\[4, 11\)"):
            b.topic(TOPIC).append(b"lost?")


def test_a_living_owner_is_named_whatever_it_has_exported(environment: Environment) -> None:
    with environment.open("A") as a, environment.open("B") as b:
        a.create_topic(TOPIC).append(b"0")
        for call in (lambda: b.topic(TOPIC).append(b"1"), lambda: b.take_over(TOPIC, accept_loss=True)):
            with pytest.raises(Moved, match="owned by the living session"):
                call()
        inside(a).lose_session()
        with pytest.raises(Unavailable, match="waits for"):
            b.topic(TOPIC).append(b"1")


def test_the_default_follows_from_the_class(environment: Environment) -> None:
    with environment.open("A") as a:
        made = {
            durability: a.create_topic(f"shop/{durability}", durability=durability).spec.loss_policy.value
            for durability in ("fsync", "disk", "memory", "ephemeral")
        }
        with pytest.raises(Invalid, match="nothing to wait for"):
            a.create_topic("shop/x", durability="ephemeral", on_owner_loss="wait")
        with pytest.raises(Invalid, match="on_owner_loss"):
            a.create_topic("shop/x", on_owner_loss="perhaps")
        with pytest.raises(Invalid, match="accept_loss"):
            a.take_over("shop/fsync", by="anna")
    assert made == {"fsync": "wait", "disk": "wait", "memory": "take_over", "ephemeral": "take_over"}


def test_what_lies_in_one_directory_alone_cannot_be_given_up(tmp_path: Path) -> None:
    environment = directories.local(tmp_path)
    with environment.open("A") as a:
        a.create_topic(TOPIC).append(b"0")
    with environment.open("B") as b:
        before = _at_rest(b)
        with pytest.raises(Unsupported, match="local"):
            b.take_over(TOPIC, accept_loss=True)
        assert _at_rest(b) == before
