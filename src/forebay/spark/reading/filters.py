"""What a query asks of rows before it sees them: applied exactly, so that Spark need not ask again.

Offsets and partitions narrow the ranges, times leave out whole segments and frames, keys and tags are looked up in the
index of a segment; what is left of all that is compared record by record, a frame at a time. Plain values, which travel
to tasks. Knows neither Spark nor files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property, reduce
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from forebay.format.frame.batch import Batch
from forebay.format.index.lookups import Sought
from forebay.format.index.sections import FrameEntries
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.records import OFFSET_MAX

T = TypeVar("T")
Mask: TypeAlias = npt.NDArray[np.bool_]

_KINDS: Final[dict[str, type]] = {
    "offset": int,
    "partition": int,
    "timestamp": datetime,
    "topic": str,
    "key": bytes,
    "tag": str,
}
_ALWAYS_THERE: Final = ("offset", "partition", "timestamp", "topic")
_NAMES: Final = {
    "EqualTo": "=",
    "EqualNullSafe": "<=>",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "In": "in",
    "IsNull": "is null",
    "IsNotNull": "is not null",
    "StringStartsWith": "starts with",
}
_COMPARISONS: Final = {"=": pc.equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Condition(NamedTuple):
    """One comparison that every row must pass. Times are in microseconds, as Spark counts them."""

    column: str
    name: str
    value: Any = None

    @classmethod
    def parse(cls, asked: object) -> Condition | None:
        """A filter of Spark's; `None` for one that must be left to it."""
        name = _NAMES.get(type(asked).__name__)
        path: Sequence[str] = getattr(asked, "attribute", ())
        kind = _KINDS.get(path[0]) if len(path) == 1 else None
        if name is None or kind is None:
            return None
        column: str = path[0]
        value: Any = getattr(asked, "value", None)
        if name == "<=>":
            name = "is null" if value is None else "="
        if name in ("is null", "is not null"):
            return cls(column, name)
        if name == "in":
            # No row equals null: it adds nothing to a list.
            values = [_plain(entry, kind) for entry in value if entry is not None]
            return cls(column, name, tuple(values)) if None not in values else None
        plain = _plain(value, kind)
        is_text = kind is str or name != "starts with"
        return cls(column, name, plain) if plain is not None and is_text else None

    def passed_by(self, value: Any) -> bool:
        """Whether one value that is not null passes."""
        match self.name:
            case "is null":
                return False
            case "is not null":
                return True
            case "in":
                return value in self.value
            case "starts with":
                return bool(value.startswith(self.value))
            case _:
                return bool(_COMPARISONS[self.name](pa.scalar(value), pa.scalar(self.value)).as_py())

    def mask(self, column: pa.Array) -> pa.Array:
        """Which values of a column pass; null ones only where that is asked."""
        match self.name:
            case "is null":
                return pc.is_null(column)
            case "is not null":
                return pc.is_valid(column)
            case "in":
                return pc.is_in(column, pa.array(self.value, column.type))
            case "starts with":
                found = pc.starts_with(column, self.value)
            case _:
                found = _COMPARISONS[self.name](column, pa.scalar(self.value, column.type))
        return pc.fill_null(found, fill_value=False)

    @property
    def span(self) -> tuple[int, int]:
        """The least and the greatest number that may pass, for columns of numbers."""
        below = {"<": lambda: self.value - 1, "<=": lambda: self.value, "=": lambda: self.value}
        above = {">": lambda: self.value + 1, ">=": lambda: self.value, "=": lambda: self.value}
        if self.name == "in":
            return min(self.value, default=1), max(self.value, default=0)
        if self.name == "is null":
            return 1, 0
        low, high = above.get(self.name), below.get(self.name)
        return low() if low is not None else -OFFSET_MAX, high() if high is not None else OFFSET_MAX


@dataclass(frozen=True)
class Filters:
    """Conditions that all hold for every row that is shown."""

    conditions: tuple[Condition, ...] = ()

    def also(self, other: Filters) -> Filters:
        """These conditions, and those."""
        return Filters((*self.conditions, *other.conditions))

    def offsets(self, start: int, stop: int) -> tuple[int, int]:
        """The part of `[start, stop)` that may pass."""
        low, high = self.span_of("offset")
        return max(start, low), min(stop, high + 1)

    def may_match_partition(self, topic: str, partition: int) -> bool:
        """Whether rows of this partition may pass."""
        given = {"topic": topic, "partition": partition}
        return all(each.passed_by(given[each.column]) for each in self.conditions if each.column in given)

    def may_match(self, descriptor: SegmentDescriptor) -> bool:
        """Whether a row of a segment may pass, by its times; a gap passes, for its sake alone."""
        low, high = self.span_of("timestamp")
        return descriptor.gap is not None or (descriptor.time_max * 1000 >= low and descriptor.time_min * 1000 <= high)

    @property
    def narrows(self) -> bool:
        """Whether an index says which frames are needed."""
        return self.by_postings or any(each.column == "timestamp" for each in self.conditions)

    @property
    def by_postings(self) -> bool:
        """Whether an index says which records may pass."""
        return bool(self.sought)

    @cached_property
    def sought(self) -> Sequence[Sought]:
        """Keys or tags of which a row must have one; empty if nothing of that kind is asked."""
        for column, one in (("key", Sought.of_key), ("tag", Sought.of_tag)):
            for each in self.conditions:
                if each.column == column and each.name in ("=", "in"):
                    values = each.value if each.name == "in" else (each.value,)
                    return [one(value) for value in values]
        return ()

    def may_match_frames(self, entries: FrameEntries) -> Mask:
        """For each frame of an index whether a row of it may pass, by its times."""
        low, high = self.span_of("timestamp")
        # Numbers of any size: times in an index are milliseconds, and may be as large as they like.
        low_ms, high_ms = (max(-OFFSET_MAX, min(OFFSET_MAX, bound)) for bound in (-(-low // 1000), high // 1000))
        found: Mask = (entries["time_max"] >= low_ms) & (entries["time_min"] <= high_ms)
        return found

    @cached_property
    def by_row(self) -> tuple[Condition, ...]:
        """Conditions that each row is compared with; the others narrowed the range for good."""
        decided = [each for each in self.conditions if each.column in ("topic", "partition")]
        decided += [each for each in self.conditions if each.column == "offset" and each.name != "in"]
        decided += [each for each in self.conditions if each.column in _ALWAYS_THERE and each.name == "is not null"]
        return tuple(each for each in self.conditions if each not in decided)

    def mask(self, batch: Batch) -> Mask | None:
        """Which records of a batch pass; `None` if all do."""
        return self._mask(self._column(batch, each.column) for each in self.by_row)

    def mask_of(self, rows: pa.RecordBatch) -> Mask | None:
        """The same for rows of a Parquet segment."""
        return self._mask(_stamped(rows.column(each.column), each.column) for each in self.by_row)

    def _mask(self, columns: Iterable[pa.Array]) -> Mask | None:
        """For the column of each condition by row."""
        masks = [each.mask(column) for each, column in zip(self.by_row, columns, strict=True)]
        if not masks:
            return None
        mask: Mask = reduce(pc.and_, masks).to_numpy(zero_copy_only=False)
        return None if mask.all() else mask

    @staticmethod
    def _column(batch: Batch, column: str) -> pa.Array:
        if column == "offset":
            return pa.array(np.arange(batch.base, batch.end, dtype=np.int64))
        if column == "timestamp":
            return _micros(batch.timestamps())
        return batch.to_arrow(0, [column]).column(0)

    def span_of(self, column: str) -> tuple[int, int]:
        spans = [each.span for each in self.conditions if each.column == column]
        return max((low for low, _ in spans), default=-OFFSET_MAX), min((high for _, high in spans), default=OFFSET_MAX)


NO_FILTERS: Final = Filters()


def pushed(asked: Iterable[T]) -> tuple[Filters, list[T]]:
    """What is applied here of Spark's filters, and those that are not, each the very object that was given."""
    conditions, left = [], []
    for each in asked:
        condition = Condition.parse(each)
        if condition is None:
            left.append(each)
        else:
            conditions.append(condition)
    return Filters(tuple(conditions)), left


def _plain(value: object, kind: type) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        return None
    if isinstance(value, datetime):
        if value.tzinfo is None:
            return None
        return micros_of(value)
    return value


def micros_of(moment: datetime) -> int:
    """A time with its zone, in microseconds since 1970."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def _micros(stamps: npt.NDArray[np.int64]) -> pa.Array:
    # Times that have no place in Spark's type compare as what they are: beyond all others.
    bound = OFFSET_MAX // 1000
    return pa.array(np.clip(stamps, -bound, bound) * 1000)


def _stamped(column: pa.Array, name: str) -> pa.Array:
    return column.cast(pa.int64()) if name == "timestamp" else column
