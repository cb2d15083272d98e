"""Names of cursors that are Forebay's own: a client who could move one would make a router or a replay skip records."""

from __future__ import annotations

import re
from typing import Final

from forebay.errors import Invalid

_RESERVED: Final = re.compile(r"router-[0-9a-f]{16}|forebay\..*", re.DOTALL)


def check_not_reserved(name: str) -> None:
    """`Invalid` for the name of a group or subscription that is the cursor of a router, or of a replay."""
    if _RESERVED.fullmatch(name):
        raise Invalid(
            f"{name!r} is a place that Forebay keeps for itself: take another name; "
            "a router is paused, altered and deleted by /v1/routers"
        )
