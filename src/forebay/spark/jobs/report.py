"""What a job says in the end, in a form that a person and a program can read, and how far it is meanwhile.

`JobShard` is where a job that goes shard by shard counts, and notes what went wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec

from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.inspection.findings import Finding, Severity
from forebay.topics import ShardRef, refs_of

if TYPE_CHECKING:
    from forebay.spark.place.opening import Opened

Figure: TypeAlias = int | float | str | bool | None


class JobProgress(Protocol):
    """Something that shows how far a job has come."""

    def total(self, amount: int) -> None:
        """How much there is in all."""

    def advance(self, amount: int) -> None:
        """So much more is done."""


class Unseen:
    """Progress that is not shown."""

    def total(self, amount: int) -> None:
        """Not shown."""

    def advance(self, amount: int) -> None:
        """Not shown."""


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a job did with one topic, or with one partition of it."""

    topic: str
    partition: int | None = None
    figures: dict[str, Figure] = msgspec.field(default_factory=dict)

    def __str__(self) -> str:
        place = self.topic if self.partition is None else f"{self.topic}[{self.partition}]"
        return f"{place}: {_listed(self.figures)}"


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a job did or, with `dry_run`, would do. `summary` is one line; `figures` are of all of it."""

    job: str
    summary: str
    dry_run: bool = False
    figures: dict[str, Figure] = msgspec.field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Nothing failed and nothing is damaged; warnings and notes do not count."""
        return all(finding.severity is not Severity.ERROR for finding in self.findings)

    def json(self) -> str:
        """All of it on one line."""
        return msgspec.json.encode(self).decode()

    def lines(self) -> list[str]:
        """All of it for a person: what was found, part by part, then the summary."""
        lines = [str(finding) for finding in self.findings]
        lines += [str(part) for part in self.parts]
        if self.figures:
            lines.append(_listed(self.figures))
        doing = " (dry run: nothing was changed)" if self.dry_run else ""
        return [*lines, f"{self.job}: {self.summary}{doing}, {self.seconds:.1f} s"]


def summed(parts: Sequence[Part]) -> dict[str, Figure]:
    """The figures of all parts added up, by name; those that are no numbers are left out."""
    totals: dict[str, Figure] = {}
    for part in parts:
        for name, figure in part.figures.items():
            if isinstance(figure, int | float) and not isinstance(figure, bool):
                before = totals.get(name, 0)
                assert isinstance(before, int | float)
                totals[name] = before + figure
    return totals


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


def _listed(figures: Mapping[str, Figure]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_shown(figure)}" for name, figure in figures.items())


def _shown(figure: Figure) -> str:
    if isinstance(figure, bool):
        return "yes" if figure else "no"
    if isinstance(figure, float):
        return f"{figure:,.3f}".rstrip("0").rstrip(".")
    return f"{figure:,}" if isinstance(figure, int) else str(figure)
