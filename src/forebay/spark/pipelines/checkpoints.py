"""How far a streaming sink has come, as Spark's checkpoint says: which batch, and up to which offsets."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from forebay.errors import ForebayError
from forebay.spark.reading.streaming.offsets import StreamOffsets


class LastBatch(NamedTuple):
    """The last batch that was begun. It is done again unless it was `committed`."""

    batch: int
    committed: bool
    offsets: dict[str, dict[int, int]]
    """Behind the batch, by topic and partition."""


def standing(checkpoint: str) -> LastBatch | None:
    """Where a sink stands; `None` if it has not begun, or if its checkpoint is not on this machine."""
    begun, done = _batches(Path(checkpoint, "offsets")), _batches(Path(checkpoint, "commits"))
    if not begun:
        return None
    content = Path(checkpoint, "offsets", str(begun[-1])).read_text()
    offsets: dict[str, dict[int, int]] = {}
    for line in content.splitlines()[1:]:
        for topic, points in points_of(line).items():
            offsets.setdefault(topic, {}).update(points)
    return LastBatch(begun[-1], bool(done) and done[-1] == begun[-1], offsets)


def may_have_begun(checkpoint: str) -> bool:
    """Whether a sink goes on from its checkpoint, as far as is seen from this machine: another may know of one."""
    return not Path(checkpoint).is_absolute() or standing(checkpoint) is not None


def points_of(stored: Any) -> dict[str, dict[int, int]]:
    """The offsets by topic and partition, if they are ours, as JSON or as what it stands for; else nothing."""
    with contextlib.suppress(msgspec.MsgspecError, ForebayError):
        found = StreamOffsets.parse(msgspec.json.decode(stored) if isinstance(stored, str) else stored)
        return {
            topic: {partition: point.offset for partition, point in points.points.items()}
            for topic, points in found.topics.items()
        }
    return {}


def _batches(directory: Path) -> list[int]:
    if not directory.is_absolute() or not directory.is_dir():
        return []
    return sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdigit())
