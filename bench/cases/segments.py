"""A topic of more and more segments: what one more costs, and what a look-up costs among them.

One topic grows in one directory from the fewest to the most; at each size the same few things are timed. None of them
should depend on how many segments there are.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forebay
from bench import payload
from bench.plan import Figures, Plan
from bench.results import Limit, Result, at_most, result

RECORDS = 10
"""Of a segment, a millisecond apart."""
EXPORTED_TOGETHER = 250
SLACK = 1.2
BEGINNING_MS = 1_700_000_000_000
STEPS = {
    "append and rotate": "append to a segment and rotate it",
    "export": "export one segment",
    "by time": "find an offset by its time, hot",
    "by offset": "read one record by its offset, hot",
    "open": "open the log and read the record in the middle",
}


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    sizes = plan.sizes.segments
    place = plan.shared("segments", lambda path: None)
    found: dict[int, Figures] = {}
    for count in sizes:
        plan.say(f"{count} segments")
        _grow(place, count)
        found[count] = _measured(plan, place, count)
        # What was timed has left some segments more: they are part of the next size.
    for step, said in STEPS.items():
        for count in sizes:
            fewest = {} if count == sizes[0] else {f"{sizes[0]:,} segments": found[sizes[0]][step]}
            limits: list[Limit] = [at_most(SLACK, name) for name in fewest]
            yield result("segments", f"{said}, of {count:,}", "ms", found[count][step], fewest, limits)


@contextlib.contextmanager
def _opened(place: Path) -> Iterator[tuple[Any, Any]]:
    """The log and its topic. Nothing is exported, rotated or removed by itself while it is timed."""
    settings = {"storage": {"mode": "shared_fs"}, "store": {"root": str(place / "store")}}
    with forebay.open(place / "data", settings) as log:
        yield log, log.create_topic("bench/t", durability="disk", exist_ok=True)


def _append(topic: Any) -> None:
    """One segment more."""
    first = topic.offsets().next
    values = [_value(offset) for offset in range(first, first + RECORDS)]
    topic.append_many(values, timestamps=[BEGINNING_MS + offset for offset in range(first, first + RECORDS)])
    topic.rotate()


def _value(offset: int) -> bytes:
    return b"%020d" % offset


def _grow(place: Path, count: int) -> None:
    """Up to so many segments, all exported."""
    with _opened(place) as (log, topic):
        while (made := topic.offsets().next // RECORDS) < count:
            for _ in range(min(EXPORTED_TOGETHER, count - made)):
                _append(topic)
            log.export_topic("bench/t")


def _measured(plan: Plan, place: Path, count: int) -> Figures:
    chance, times = random.Random(count), plan.sizes.segment_times
    figures: Figures = {}

    def opened() -> None:
        with _opened(place) as (_, topic):
            offset = count * RECORDS // 2
            _same(next(iter(topic.read(offset))).value, _value(offset))

    figures["open"] = _median(opened, 3)
    with _opened(place) as (log, topic):

        def by_time() -> None:
            offset = chance.randrange(count * RECORDS)
            _same(topic.offset_at_time(BEGINNING_MS + offset), offset)

        def by_offset() -> None:
            offset = chance.randrange(count * RECORDS)
            _same(next(iter(topic.read(offset))).value, _value(offset))

        for step, call in (("by time", by_time), ("by offset", by_offset)):
            _median(call, times)
            figures[step] = _median(call, times)
        appends, exports = [], []
        for _ in range(times):
            appends.append(_median(lambda: _append(topic), 1))
            exports.append(_median(lambda: log.export_topic("bench/t"), 1))
        payload.check_count("history", topic.offsets().next, topic.offsets().exported)
    return figures | {"append and rotate": statistics.median(appends), "export": statistics.median(exports)}


def _median(call: Callable[[], object], times: int) -> float:
    """Milliseconds of a call."""
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken) * 1e3


def _same(found: object, expected: object) -> None:
    if found != expected:
        raise payload.Wrong(f"{found!r} was found instead of {expected!r}")
