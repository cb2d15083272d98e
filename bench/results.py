"""One measured figure, what it is compared with, and whether an aim is met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec


class Limit(NamedTuple):
    """`sign` number, of the figure itself or of its ratio to a peer."""

    sign: str
    number: float
    peer: str | None = None

    def __str__(self) -> str:
        return f"{self.sign} {self.number:,.10g}" + (f" × {self.peer}" if self.peer else "")

    def holds(self, ours: float, ratio: Mapping[str, float | None]) -> bool | None:
        """Whether the figure keeps to it; `None` if the peer could not be measured."""
        figure = ratio.get(self.peer) if self.peer else ours
        if figure is None:
            return None
        return figure >= self.number if self.sign == "≥" else figure <= self.number


def at_least(number: float, peer: str | None = None) -> Limit:
    """More is better."""
    return Limit("≥", number, peer)


def at_most(number: float, peer: str | None = None) -> Limit:
    """Less is better."""
    return Limit("≤", number, peer)


class Result(msgspec.Struct, frozen=True):
    """A line of the output. A peer that could not be had has no value; `ratio` is ours / peer."""

    case: str
    metric: str
    unit: str
    ours: float
    peers: dict[str, float | None]
    ratio: dict[str, float | None]
    aim: str | None
    met: bool | None


def result(
    case: str,
    metric: str,
    unit: str,
    ours: float,
    peers: Mapping[str, float | None] | None = None,
    limits: Sequence[Limit] = (),
) -> Result:
    """The figure with its ratios, held against its limits."""
    rounded = {name: _rounded(value) for name, value in (peers or {}).items()}
    ratio = {name: _rounded(ours / value) if value else None for name, value in rounded.items()}
    held = [limit.holds(ours, ratio) for limit in limits]
    met: bool | None = None
    if held:
        met = False if False in held else None if None in held else True
    return Result(
        case=case,
        metric=metric,
        unit=unit,
        ours=_rounded(ours) or 0.0,
        peers=rounded,
        ratio=ratio,
        aim=", ".join(map(str, limits)) or None,
        met=met,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
