"""The run that a case's figures are from."""

from __future__ import annotations

import msgspec


class Run(msgspec.Struct, frozen=True, omit_defaults=True):
    """The run of a case: what of, when, and on what. Of runs before it was noted the commit is not known."""

    case: str
    commit: str | None = None
    """What was measured; `+` at its end if files differed from it."""
    begun: str = ""
    seconds: float = 0.0
    rounds: int = 0
    cores: int = 0
    loads: tuple[float, ...] = ()
    """The load average before and after it."""
    system: str = ""

    def __str__(self) -> str:
        parts = [
            f"commit {self.commit or 'not noted'}",
            f"{self.begun} UTC, {self.seconds:.0f} s",
            f"{self.rounds} rounds" if self.rounds else "",
            f"{self.cores} cores, load {' to '.join(f'{load:.1f}' for load in self.loads)}",
            self.system,
        ]
        return "; ".join(filter(None, parts))
