"""What goes through the broker: every request counted by its route, and one log line for those worth it.

For one event loop, so without a lock. The numbers are published with those of the log.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from forebay.broker.audit import FORBIDDEN, UNAUTHENTICATED, AuditLog
from forebay.broker.exchange import Request
from forebay.broker.routes import Route
from forebay.clock import Clock
from forebay.errors import ForebayError
from forebay.meter import Histogram

logger = logging.getLogger(__name__)

_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TRACE: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
NO_ROUTE: Final = "none"
"""The name of the route where a request fits none: addresses of clients are no labels."""
FAILURE: Final = 500
"""The status of an error that the broker itself has made, or found in what it keeps: every one is logged."""
GONE: Final = 499
"""The status of a request whose client has gone before it was answered."""


LAG_SECONDS: Final = 0.1
"""How often the event loop is asked how late it is."""
LAG_WINDOW_SECONDS: Final = 60.0
"""How long a lag is shown: longer than the time between two looks of who gathers metrics."""


class LoopLag:
    """How late the event loop comes to what is due: the longest of the last while, for everyone who looks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._longest: deque[tuple[float, float]] = deque()
        """When it came late, and how much: only those after which it was not as late. The longest comes first."""

    def __len__(self) -> int:
        return len(self._longest)

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self.note(loop.time() - due)

    def note(self, seconds: float) -> None:
        """It came so late just now."""
        now, kept = self._clock.monotonic(), self._longest
        while kept and kept[-1][1] <= seconds:
            kept.pop()
        kept.append((now, seconds))
        while now - kept[0][0] > LAG_WINDOW_SECONDS:
            kept.popleft()

    def longest(self) -> float:
        """The longest of the last `LAG_WINDOW_SECONDS`. Changes nothing."""
        since = self._clock.monotonic() - LAG_WINDOW_SECONDS
        return max((seconds for at, seconds in list(self._longest) if at >= since), default=0.0)


class SeenRequest:
    """One request on its way, for the count and the log line."""

    __slots__ = ("error", "id", "route", "sent", "status", "trace")

    def __init__(self, request_id: str, trace: str | None) -> None:
        self.id = request_id
        """As the client gave it, or made here: it stands in the answer and in every log line of the request."""
        self.trace = trace
        """The OpenTelemetry header `traceparent`, if the client sent one."""
        self.route: Route | None = None
        self.status = 0
        self.sent = 0
        self.error: BaseException | None = None

    @property
    def name(self) -> str:
        """What metrics call the request."""
        return NO_ROUTE if self.route is None else self.route.name


class Traffic:
    """Counts and logs requests."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._audit = AuditLog(clock)
        self._prefix = clock.random_bytes(4).hex()
        self._number = 0
        self.under_way = 0
        self.requests: Counter[tuple[str, int]] = Counter()
        """By the name of the route and the status."""
        self.seconds: defaultdict[str, Histogram] = defaultdict(Histogram)
        """How long answers took, by the name of the route. Streams are not in it."""
        self.sent: Counter[str] = Counter()
        """Bytes of answers, by the name of the route."""

    @contextmanager
    def request(self, request: Request) -> Iterator[SeenRequest]:
        """Count one request, and log it if it is worth it."""
        self._number += 1
        given, trace = request.header(b"x-request-id"), request.header(b"traceparent")
        if given is None or not _ID.fullmatch(given):
            given = f"{self._prefix}-{self._number:x}"
        seen = SeenRequest(given, trace if trace is not None and _TRACE.fullmatch(trace) else None)
        begun = self._clock.monotonic()
        self.under_way += 1
        try:
            yield seen
        finally:
            self.under_way -= 1
            taken = self._clock.monotonic() - begun
            self.requests[seen.name, seen.status or GONE] += 1
            self.sent[seen.name] += seen.sent
            if seen.route is None or not seen.route.is_stream:
                self.seconds[seen.name].observe(taken)
            self._log(request, seen, taken)

    def _log(self, request: Request, seen: SeenRequest, taken: float) -> None:
        """Changes and refusals go to the audit log; failures of ours are warnings, all others are for `--verbose`."""
        status = seen.status or GONE
        is_audited = status in (UNAUTHENTICATED, FORBIDDEN) or (seen.route is not None and seen.route.is_audited)
        level = logging.WARNING if status == FAILURE else logging.INFO
        if not is_audited and not logger.isEnabledFor(level):
            return
        fields = {
            "request_id": seen.id,
            "route": seen.name,
            "status": status,
            "principal": request.principal.name,
            "token_id": request.principal.token_id,
            "client": request.client,
            "seconds": round(taken, 6),
            "bytes": seen.sent,
            **request.place(),
            **({"traceparent": seen.trace} if seen.trace else {}),
            **({"error": str(seen.error)} if isinstance(seen.error, ForebayError) else {}),
        }
        if is_audited:
            self._audit.note(status, fields)
        if not is_audited or level > logging.INFO:
            logger.log(level, "%s %s %d", request.method, seen.name, status, extra={"fields": fields})
