"""What an inspection found, in a form that a person and a program can read."""

from __future__ import annotations

import enum

import msgspec

UPGRADE = "upgrade: nothing is corrupt"
REACH = "see that the store can be reached, then verify again"
INSTALL = "install it, then verify again"


class Severity(enum.StrEnum):
    """How bad it is."""

    ERROR = "error"
    """Bytes or facts are not what was written."""
    WARNING = "warning"
    """Something to look at; no record is affected."""
    NOTE = "note"
    """Normal after a crash or in the middle of work, or accepted by the operator before."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that is not as it should be: where, what, and what to do next. Offsets end exclusively."""

    severity: Severity
    what: str
    next_step: str
    shard: str = ""
    file: str = ""
    byte: int | None = None
    offsets: tuple[int, int] | None = None

    def __str__(self) -> str:
        where = [self.shard, self.file]
        if self.byte is not None:
            where.append(f"at byte {self.byte}")
        if self.offsets is not None:
            where.append(f"offsets [{self.offsets[0]}, {self.offsets[1]})")
        place = " ".join(part for part in where if part)
        return f"{self.severity}: {place}{': ' if place else ''}{self.what}; {self.next_step}"


class HistorySummary(msgspec.Struct, frozen=True, kw_only=True):
    """How a shard stands: its recorded state, and what is catalogued. `owner` is a living session.

    `history` ends exclusively.
    """

    shard: str
    phase: str
    epoch: int
    owner: str | None
    holder: str | None
    next_offset: int
    reserved_end: int
    history: tuple[int, int]
    segments: int
    gaps: int
    bytes: int

    def __str__(self) -> str:
        gaps = f", {self.gaps} gaps" if self.gaps else ""
        owner = f", owned by session {self.owner}" if self.owner else ""
        return (
            f"{self.shard}: {self.phase}, epoch {self.epoch}{owner}; history [{self.history[0]}, {self.history[1]}) "
            f"in {self.segments} segments{gaps}"
        )


class Report:
    """All findings, and how much was looked at."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.histories: list[HistorySummary] = []
        self.shards = 0
        self.files = 0
        self.bytes = 0
        self.frames = 0
        self.records = 0
        self.objects = 0
        self.object_bytes = 0

    def __repr__(self) -> str:
        return (
            f"Report(is_clean={self.is_clean}, findings={len(self.findings)}, shards={self.shards}, "
            f"files={self.files}, records={self.records}, objects={self.objects})"
        )

    @property
    def is_clean(self) -> bool:
        """No error was found; warnings and notes do not count."""
        return all(finding.severity is not Severity.ERROR for finding in self.findings)

    @property
    def is_open(self) -> bool:
        """Nothing that could be looked at is wrong, but not all of it could be."""
        errors = [finding for finding in self.findings if finding.severity is Severity.ERROR]
        return bool(errors) and all(finding.next_step in (REACH, INSTALL) for finding in errors)

    def add(
        self,
        severity: Severity,
        what: str,
        next_step: str,
        *,
        shard: str = "",
        file: str = "",
        byte: int | None = None,
        offsets: tuple[int, int] | None = None,
    ) -> None:
        """Note a finding."""
        self.findings.append(
            Finding(
                severity=severity, what=what, next_step=next_step, shard=shard, file=file, byte=byte, offsets=offsets
            )
        )

    def absorb(self, other: Report) -> None:
        """Take over what another report says."""
        self.findings += other.findings
        self.histories += other.histories
        self.shards += other.shards
        self.files += other.files
        self.bytes += other.bytes
        self.frames += other.frames
        self.records += other.records
        self.objects += other.objects
        self.object_bytes += other.object_bytes
