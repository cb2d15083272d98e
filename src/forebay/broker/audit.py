"""The audit log: who changed what, and who was refused. One line each, of the logger `forebay.audit`.

A line never has a secret: a caller is named by its principal and the id of its token.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from forebay.clock import Clock

logger = logging.getLogger("forebay.audit")

UNAUTHENTICATED: Final = 401
FORBIDDEN: Final = 403
FAILED_MIN: Final = 400
LINES_MAX: Final = 20
"""Lines about callers without a valid token that are written at once; then one more each second."""


class AuditLog:
    """Writes the lines. For one event loop.

    Callers without a valid token could fill a disk with refusals, so only some of those are written; the next line says
    how many were left out. All of them are counted in the metrics of requests.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._room = float(LINES_MAX)
        self._looked = clock.monotonic()
        self._left_out = 0

    def note(self, status: int, fields: dict[str, Any]) -> None:
        """Write one call, with the status of its answer."""
        if status == UNAUTHENTICATED and not self._take_room():
            self._left_out += 1
            return
        outcome = "done"
        if status >= FAILED_MIN:
            outcome = "refused" if status in (UNAUTHENTICATED, FORBIDDEN) else "failed"
        if self._left_out:
            fields = {**fields, "left_out": self._left_out}
            self._left_out = 0
        logger.info(
            "%s of %s by %s (token %s) from %s: %s, %d",
            fields["route"],
            fields.get("topic", "-"),
            fields["principal"],
            fields["token_id"] or "-",
            fields["client"],
            outcome,
            status,
            extra={"fields": {**fields, "outcome": outcome}},
        )

    def _take_room(self) -> bool:
        now = self._clock.monotonic()
        self._room = min(float(LINES_MAX), self._room + now - self._looked)
        self._looked = now
        if self._room < 1:
            return False
        self._room -= 1
        return True
