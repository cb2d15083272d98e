"""Streams of operations on engines with look-ups, and what an engine answers to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random  # noqa: TID251  # seeded: the same run again
from typing import NamedTuple, Protocol

from forebay.engines.by_name import NewRecord
from forebay.errors import ForebayError
from forebay.pages import Page, joined
from forebay.records import Gap, Record
from forebay.testing.contracts.engines import NamedEngine, append_by, steps_of
from forebay.testing.contracts.lookups import paged
from forebay.testing.simulated.clock import ManualClock
from forebay.topics import ShardRef

KEYS = (b"", b"a", b"a\0", b"b", b"c" * 300)
TAGS = ("x", "x/y", "xx", "\N{SNOWMAN}")


class Step(NamedTuple):
    """One operation on one partition, with its arguments."""

    kind: str
    partition: int = 0
    what: tuple[object, ...] = ()


class RestartableEngine(Protocol):
    """An engine that may be restarted, with the clock that it goes by."""

    clock: ManualClock
    engine: NamedEngine

    def ref(self, partition: int) -> ShardRef: ...

    def restart(self) -> None:
        """End the engine in order and go on with the next; nothing where records end with the engine."""

    def tidy(self, partition: int, depth: int) -> None:
        """Rotate; from depth 1 on seal, from 2 on make it history, from 3 on drop copies. No reader may notice."""


APPENDS = ("write", "batch", "produce")
LOOK_UPS = ("read", "by_key", "newest", "by_tag", "at_time")
DELETES = ("delete_key", "delete_tag", "delete_range", "delete_before")
OTHERS = ("evict", "jump", "group", "tidy", "restart")


def mixed(seed: str, length: int) -> list[Step]:
    """A stream of every operation on two partitions, with a few hundred records in each."""
    chance = Random(seed)
    kinds = APPENDS + LOOK_UPS + DELETES + OTHERS
    weights = [4, 8, 4] + [2] * len(LOOK_UPS) + [1] * len(DELETES) + [4, 4, 1, 4, 2]
    script: list[Step] = []
    heads = [0, 0]
    for _ in range(length):
        kind, partition = chance.choices(kinds, weights)[0], chance.randrange(2)
        step = Step(kind, partition, _arguments(chance, kind, heads[partition]))
        if kind == "batch":
            heads[partition] += len(step.what[0])  # type: ignore[arg-type]
        script.append(step)
    return script + chance.choice([[], [Step("restart")]])


def _arguments(chance: Random, kind: str, head: int) -> tuple[object, ...]:
    """What such an operation is asked for; `head` is about where the partition ends."""
    offset = chance.randrange(head + 10)
    key, tag, most = chance.choice(KEYS), chance.choice(TAGS), chance.randrange(1, 30)
    asked: dict[str, Callable[[], tuple[object, ...]]] = {
        "write": lambda: (_record(chance, chance.randbytes(chance.randrange(120))),),
        "batch": lambda: ([_record(chance, b"%d" % n * n) for n in range(chance.choice([0, 1, 2, 9, 30, 90]))],),
        "produce": lambda: (chance.randrange(1, 5), chance.randrange(9)),
        "read": lambda: (offset, most, chance.choice([1, 100, 2_000])),
        "by_key": lambda: (key, offset, most),
        "newest": lambda: (key, offset),
        "by_tag": lambda: (tag, offset, most),
        "at_time": lambda: (chance.randrange(-6, 103),),
        "delete_key": lambda: (key,),
        "delete_tag": lambda: (tag,),
        "delete_range": lambda: (offset, chance.choice([0, 1, 5, 70])),
        "delete_before": lambda: (offset // 2,),
        "jump": lambda: (chance.choice([-3_000, -1, 10, 1_000, 2_000, 9_000]),),
        "group": lambda: (chance.choice(["g", "h"]), offset),
        "tidy": lambda: (chance.randrange(4),),
    }
    return asked.get(kind, tuple)()


def seeded(seed: int, length: int) -> list[Step]:
    """A stream of changes that keeps a few hundred records alive."""
    chance = Random(seed)
    script: list[Step] = []
    for number in range(length):
        kind = chance.choices(
            ["write", "batch", "produce", "delete_key", "delete_tag", "delete_range", "delete_before", "evict"],
            [8, 5, 3, 1, 1, 2, 1, 2],
        )[0]
        new = [_record(chance, b"%d" % number) for _ in range(chance.choice([1, 2, 30, 400]) if kind == "batch" else 1)]
        start = chance.randrange(0, number * 30 + 1)
        what: dict[str, tuple[object, ...]] = {
            "write": (new[0],),
            "batch": (new,),
            "produce": (1, sum(step.kind == "produce" for step in script)),
            "delete_key": (chance.choice(KEYS),),
            "delete_tag": (chance.choice(TAGS),),
            "delete_range": (start, chance.randrange(200)),
            "delete_before": (start // 2,),
            "evict": (),
        }
        script.append(Step(kind, 0, what[kind]))
    return script


def _record(chance: Random, value: bytes) -> NewRecord:
    return NewRecord(value, chance.randrange(100), chance.choice([None, *KEYS]), chance.choice([None, *TAGS]))


def answer(life: RestartableEngine, step: Step) -> object:
    """What the engine says to one operation; an error counts by its family."""
    engine, ref = life.engine, life.ref(step.partition)
    answers: dict[str, Callable[..., object]] = {
        "write": partial(engine.write, ref),
        "batch": partial(engine.batch_write, ref),
        "produce": lambda *what: append_by(engine.open_shard(ref), *what),
        "read": lambda start, most, size: seen(engine, ref, start, records_max=most, bytes_max=size),
        "by_key": lambda key, start, most: _found(partial(engine.read_by_key, ref, key, history=True), start, most),
        "newest": lambda key, start: _found(partial(engine.read_by_key, ref, key), start, 1),
        "by_tag": lambda tag, start, most: _found(partial(engine.read_by_tag, ref, tag), start, most),
        "at_time": partial(engine.get_offset_by_timestamp, ref),
        "delete_key": partial(engine.delete_by_key, ref),
        "delete_tag": partial(engine.delete_by_tag, ref),
        "delete_range": lambda start, count: engine.delete_by_offset(ref, start, start + count),
        "delete_before": partial(engine.delete_before, ref),
        "evict": lambda: engine.open_shard(ref).evict(life.clock.now_ms()),
        "jump": life.clock.jump,
        "group": lambda group, offset: (
            engine.commit_offset(ref, group, offset),
            engine.get_offset_by_group(ref, group),
        ),
        "restart": life.restart,
        "tidy": partial(life.tidy, step.partition),
    }
    try:
        return answers[step.kind](*step.what)
    except ForebayError as error:
        return type(error)


def seen(engine: NamedEngine, ref: ShardRef, start: int = 0, **limits: int) -> list[Record | Gap]:
    """What a reader finds, whatever the pages: records, and gaps as large as they are."""
    found: list[Record | Gap] = []
    for step in steps_of(engine, ref, start, **limits):
        if isinstance(step, Gap) and found and isinstance(found[-1], Gap):
            found[-1:] = joined([found[-1], step])
        else:
            found.append(step)
    return found


def _found(look_up: Callable[..., Page], start: int, most: int) -> object:
    return paged(lambda at: look_up(at, records_max=most), start)


def standing(engine: NamedEngine, ref: ShardRef) -> list[object]:
    """Everything that can be asked of a shard."""
    offsets = engine.open_shard(ref).offsets()
    reported: list[object] = [seen(engine, ref, bytes_max=500), offsets._replace(durable=0, exported=0)]
    reported += [_found(partial(engine.read_by_key, ref, key, history=True), 0, 50) for key in KEYS]
    reported += [_found(partial(engine.read_by_tag, ref, tag), 0, 50) for tag in TAGS]
    reported += [engine.get_offset_by_timestamp(ref, time) for time in range(-6, 101, 3)]
    return reported
