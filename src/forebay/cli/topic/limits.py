"""Limits of topics as they are written on the command line: 10GiB, 7d, none."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Final

import typer

from forebay.errors import Invalid

if TYPE_CHECKING:
    from forebay.topics import TopicLimits

CapRecordsOption = Annotated[
    str | None, typer.Option(metavar="N", help="Offsets that each partition keeps, or none.", show_default=False)
]
CapBytesOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Bytes that each partition keeps: 10GiB, or none.", show_default=False),
]
TtlOption = Annotated[
    str | None,
    typer.Option("--ttl", metavar="TIME", help="How long after their append records are kept: 7d, or none."),
]
OnFullOption = Annotated[
    str | None, typer.Option(metavar="POLICY", help="At a cap: discard-old (the default) or reject-new.")
]
CleanupOption = Annotated[
    str | None,
    typer.Option(
        metavar="POLICY", help="delete (the default), or compact: records end once a later one has their key."
    ),
]
CompactLagOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="How old a record is before it is compacted away [default: 1d].")
]

DispatchOption = Annotated[
    str | None,
    typer.Option(
        metavar="POLICY",
        help="How subscriptions deliver: reliable (at least once, the default) or non-reliable (at most once).",
    ),
]

OwnerLossOption = Annotated[
    str | None,
    typer.Option(
        metavar="POLICY",
        help="When an owner is gone with records that were not exported: wait for it (the default), or take-over "
        "(the default of class memory): the next write elsewhere goes on without them.",
    ),
]

_NUMBER: Final = re.compile(r"([0-9]{1,19})\s*([A-Za-z]*)")
_SIZES: Final = {"": 1, "B": 1} | {
    f"{letter}{mark}": base**power
    for power, letter in enumerate("KMGT", 1)
    for mark, base in (("iB", 1024), ("B", 1000))
}
_SPANS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}


def parse_limits(
    cap_records: str | None,
    cap_bytes: str | None,
    ttl: str | None,
    on_full: str | None,
    cleanup: str | None,
    compact_lag: str | None,
    dispatch: str | None,
    on_owner_loss: str | None,
) -> TopicLimits:
    """The limits that were given, and no others."""
    limits: TopicLimits = {}
    if cap_records is not None:
        limits["cap_records"] = _amount("--cap-records", cap_records, {"": 1}, "a number, as 1000000")
    if cap_bytes is not None:
        limits["cap_bytes"] = _amount("--cap-bytes", cap_bytes, _SIZES, "a size, as 500MB or 10GiB")
    if ttl is not None:
        limits["ttl_ms"] = _amount("--ttl", ttl, _SPANS, "a time, as 30m, 12h or 7d")
    if on_full is not None:
        limits["on_full"] = on_full.replace("-", "_")
    if cleanup is not None:
        limits["cleanup"] = cleanup
    if compact_lag is not None:
        lag = _amount("--compact-lag", compact_lag, _SPANS, "a time, as 30m, 12h or 7d")
        limits["compact_lag_ms"] = 0 if lag is None else lag
    if dispatch is not None:
        limits["dispatch"] = dispatch.replace("-", "_")
    if on_owner_loss is not None:
        limits["on_owner_loss"] = on_owner_loss.replace("-", "_")
    return limits


def _amount(option: str, text: str, units: dict[str, int], form: str) -> int | None:
    if text == "none":
        return None
    found = _NUMBER.fullmatch(text.strip())
    unit = units.get(found[2]) if found is not None else None
    if found is None or unit is None:
        raise Invalid(f"{option} is {text!r:.80}; give {form}, or none")
    return int(found[1]) * unit
