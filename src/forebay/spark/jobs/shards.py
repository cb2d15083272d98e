"""One partition under a job: what was counted there, and what went wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.inspection.findings import Finding, Severity
from forebay.spark.jobs.reports import Figure, Part
from forebay.spark.place.opening import Opened
from forebay.topics import ShardRef, refs_of


@dataclass(kw_only=True)
class JobShard:
    """What a job knows of a partition; each job adds what it works with."""

    ref: ShardRef
    figures: dict[str, Figure] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def place(self) -> tuple[str, int]:
        """How units of work name it."""
        return str(self.ref.spec.name), self.ref.partition

    def count(self, name: str, more: int = 1) -> None:
        """Add to a figure."""
        before = self.figures.get(name, 0)
        assert isinstance(before, int)
        self.figures[name] = before + more

    def report(self, what: str, step: str, piece: SegmentDescriptor | None = None) -> None:
        """Note what went wrong, and with which piece of history."""
        offsets = (piece.start, piece.end) if piece is not None else None
        self.findings.append(
            Finding(severity=Severity.ERROR, what=what, next_step=step, shard=str(self.ref), offsets=offsets)
        )


def refs_at(found: Opened, topics: Sequence[str]) -> list[ShardRef]:
    """The partitions of these topics, or of all that have history."""
    return [ref for spec in found.topics(topics) for ref in refs_of(spec)]


def parts_of(shards: Iterable[JobShard]) -> tuple[Part, ...]:
    """What a report says of each."""
    return tuple(
        Part(topic=str(shard.ref.spec.name), partition=shard.ref.partition, figures=shard.figures) for shard in shards
    )


def findings_of(shards: Iterable[JobShard]) -> tuple[Finding, ...]:
    """All that went wrong."""
    return tuple(finding for shard in shards for finding in shard.findings)
