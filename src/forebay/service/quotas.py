"""How much callers may have under way at once: requests, bytes in memory, streams, topics, and rates.

Each is counted for every principal and for the process. A call beyond a limit is refused before any memory is spent on
it. Pure but for the clock. Belongs to the event loop: one thread calls everything here, so there is no lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, NoReturn, Self

from forebay.clock import Clock
from forebay.errors import Throttled, TooLarge
from forebay.settings import ServerSettings

RETRY_SECONDS: Final = 1.0
"""When to try again where no one knows when something that is under way will end."""
BURST_SECONDS: Final = 2.0
"""What a principal has not used of its rate for so long, it may use at once."""
ANSWER_BYTES_MIN: Final = 64 * 1024
"""An answer whose size can be chosen is made with so much room at least, or not at all."""
_ROUNDING: Final = 1e-6
"""Seconds."""


class RateBucket:
    """Amounts per second, on average: what is not used fills the bucket, up to `BURST_SECONDS` of it.

    An amount larger than the bucket is let through when the bucket is full, and paid off afterwards.
    """

    __slots__ = ("_level", "_rate", "_seen_at")

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._level = rate * BURST_SECONDS
        self._seen_at = now

    def wait_s(self, amount: float, now: float) -> float:
        """For how many seconds the amount has to wait; 0.0 if it may come now."""
        missing = min(amount, self._rate * BURST_SECONDS) - self._filled(now)
        # What rounding leaves of a wait that is over is none.
        return missing / self._rate if missing > _ROUNDING * self._rate else 0.0

    def take(self, amount: float, now: float) -> None:
        """Use the amount, which did not have to wait."""
        self._level = self._filled(now) - amount
        self._seen_at = now

    def is_full(self, now: float) -> bool:
        """Whether it is as good as new."""
        return self._filled(now) >= self._rate * BURST_SECONDS

    def _filled(self, now: float) -> float:
        return min(self._rate * BURST_SECONDS, self._level + (now - self._seen_at) * self._rate)


@dataclass(slots=True)
class _Use:
    """What one principal, or the process, has under way."""

    requests: int = 0
    size: int = 0
    streams: int = 0
    consumers: int = 0
    request_rate: RateBucket | None = None
    byte_rate: RateBucket | None = None

    def is_idle(self, now: float) -> bool:
        rates = (self.request_rate, self.byte_rate)
        is_at_rest = not (self.requests or self.size or self.streams or self.consumers)
        return is_at_rest and all(rate is None or rate.is_full(now) for rate in rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaCounts:
    """What goes on now, and what was admitted and refused since the server began."""

    requests: int
    bytes: int
    streams: int
    consumers: int
    """Of subscriptions, attached from request to request."""
    principals: int
    """How many of them are remembered: those with something under way, or with a rate that is not paid off."""
    admitted: int
    """Requests, streams and consumers."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """By the name of the setting that was reached."""


class Admission:
    """One request with its answer, one stream or one consumer that is under way. It counts inside its `with` block."""

    __slots__ = ("_consumers", "_is_entered", "_principal", "_quotas", "_requests", "_size", "_streams")

    def __init__(
        self, quotas: Quotas, principal: str, *, requests: int = 0, size: int = 0, streams: int = 0, consumers: int = 0
    ) -> None:
        self._quotas = quotas
        self._principal = principal
        self._requests = requests
        self._size = size
        self._streams = streams
        self._consumers = consumers
        self._is_entered = False

    def __enter__(self) -> Self:
        """Count it; `Throttled` or `TooLarge` if it is beyond a limit, and then it does not count."""
        assert not self._is_entered, "an admission is entered once"
        self._quotas.admit(
            self._principal,
            requests=self._requests,
            size=self._size,
            streams=self._streams,
            consumers=self._consumers,
        )
        self._is_entered = True
        return self

    def grow(self, size: int) -> None:
        """Count so many more bytes, before they are read: for a body whose length was not known at first.

        `Throttled` or `TooLarge` if there is no room; what was counted before stays counted until the block ends.
        """
        assert self._is_entered, "only what is under way grows"
        self._quotas.admit(self._principal, size=size, size_before=self._size)
        self._size += size

    def hold(self, size: int, *, is_done: bool = False) -> None:
        """Count so many bytes from here on, in place of those that were counted: an answer takes the place of a body.

        `Throttled` if there is no room beside what others hold, unless the call `is_done`: then no refusal takes it
        back. What is larger than a limit by itself has room when nothing else is held.
        """
        assert self._is_entered, "only what is under way holds an answer"
        self._quotas.recount(self._principal, before=self._size, size=size, is_checked=not is_done)
        self._size = size

    def reserve(self, wanted: int) -> int:
        """Count bytes for an answer that is yet to be made, `wanted` of them or fewer; how many it may have.

        An answer gets half of the room that is left at most, so that many who ask at once get less each. `Throttled`
        if there is hardly any.
        """
        size = self.share(wanted)
        self.hold(size)
        return size

    def share(self, wanted: int) -> int:
        """How many bytes an answer may have now, `wanted` or fewer, without counting any: for one that may wait."""
        assert self._is_entered, "only what is under way holds an answer"
        room = self._quotas.room(self._principal, held=self._size)
        return min(wanted, max(ANSWER_BYTES_MIN, room // 2))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._quotas.release(
            self._principal,
            requests=self._requests,
            size=self._size,
            streams=self._streams,
            consumers=self._consumers,
        )


class Quotas:
    """The limits of `ServerSettings`, and what counts against them now."""

    def __init__(self, settings: ServerSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._all = _Use()
        self._by_principal: dict[str, _Use] = {}
        """Those with something under way, or whose rate was not paid off when they left: at most one for each token."""
        self._admitted = 0
        self._refused: Counter[str] = Counter()

    def request(self, principal: str, size: int = 0) -> Admission:
        """A request of the principal whose body has `size` bytes, as far as is known; enter it with `with`."""
        return Admission(self, principal, requests=1, size=size)

    def stream(self, principal: str) -> Admission:
        """A stream of the principal; enter it with `with`."""
        return Admission(self, principal, streams=1)

    def consumer(self, principal: str) -> Admission:
        """A consumer of a subscription that the principal has attached; enter it with `with`."""
        return Admission(self, principal, consumers=1)

    def check_topics(self, *, total: int, below: int) -> None:
        """Return if one more topic may be created: there are `total`, and `below` of them the principal may see.

        `Throttled` without a time if not: it passes when topics are deleted.
        """
        settings = self._settings
        for name, count, most in (
            ("topics_per_principal_max", below, settings.topics_per_principal_max),
            ("topics_max", total, settings.topics_max),
        ):
            if count >= most:
                self._refuse(name, f"there are {count} topics, and {most} are allowed", None)

    def counts(self) -> QuotaCounts:
        """What goes on now, and what was counted so far; for a server to publish."""
        return QuotaCounts(
            requests=self._all.requests,
            bytes=self._all.size,
            streams=self._all.streams,
            consumers=self._all.consumers,
            principals=len(self._by_principal),
            admitted=self._admitted,
            refused=dict(self._refused),
        )

    def admit(
        self,
        principal: str,
        *,
        requests: int = 0,
        size: int = 0,
        streams: int = 0,
        consumers: int = 0,
        size_before: int = 0,
    ) -> None:
        """Count this for the principal and the process, or refuse it and count nothing of it. Called by `Admission`."""
        if size_before + size > self._settings.body_bytes_max:
            self._refused["server.body_bytes_max"] += 1
            raise TooLarge(
                f"the body has {size_before + size} bytes or more, and server.body_bytes_max allows "
                f"{self._settings.body_bytes_max}: send less at once",
                size=size_before + size,
                limit=self._settings.body_bytes_max,
            )
        now = self._clock.monotonic()
        use = self._by_principal.get(principal) or self._new_use(now)
        self._check_room(principal, use, requests, size, streams, consumers)
        self._check_rates(principal, use, requests, size, now)
        if use.request_rate is not None:
            use.request_rate.take(requests, now)
        if use.byte_rate is not None:
            use.byte_rate.take(size, now)
        self._by_principal[principal] = use
        for counted in (use, self._all):
            counted.requests += requests
            counted.size += size
            counted.streams += streams
            counted.consumers += consumers
        self._admitted += requests + streams + consumers

    def room(self, principal: str, *, held: int) -> int:
        """How many bytes an answer of the principal may have, in place of `held`. Called by `Admission`."""
        settings = self._settings
        return held + min(
            settings.bytes_in_flight_per_principal_max - self._by_principal[principal].size,
            settings.bytes_in_flight_max - self._all.size,
        )

    def recount(self, principal: str, *, before: int, size: int, is_checked: bool) -> None:
        """Count `size` bytes of an answer for the principal, in place of `before`. Called by `Admission`."""
        use, settings = self._by_principal[principal], self._settings
        if is_checked and size > before:
            for name, held, most in (
                ("bytes_in_flight_per_principal_max", use.size - before, settings.bytes_in_flight_per_principal_max),
                ("bytes_in_flight_max", self._all.size - before, settings.bytes_in_flight_max),
            ):
                if held and held + size > most:
                    holder = principal if "principal" in name else "the server"
                    why = f"{holder} has {held} under way, {most} are allowed, and the answer has {size}"
                    self._refuse(name, why, RETRY_SECONDS)
        for counted in (use, self._all):
            counted.size += size - before

    def release(self, principal: str, *, requests: int, size: int, streams: int, consumers: int) -> None:
        """What was admitted is over. Called by `Admission`, once for each."""
        use = self._by_principal[principal]
        for counted in (use, self._all):
            counted.requests -= requests
            counted.size -= size
            counted.streams -= streams
            counted.consumers -= consumers
        if use.is_idle(self._clock.monotonic()):
            del self._by_principal[principal]

    def _new_use(self, now: float) -> _Use:
        requests, size = self._settings.requests_per_second_max, self._settings.bytes_per_second_max
        return _Use(
            request_rate=RateBucket(requests, now) if requests else None,
            byte_rate=RateBucket(size, now) if size else None,
        )

    def _check_room(self, principal: str, use: _Use, requests: int, size: int, streams: int, consumers: int) -> None:
        settings, total = self._settings, self._all
        for name, amount, count, most in (
            ("requests_per_principal_max", requests, use.requests, settings.requests_per_principal_max),
            ("requests_max", requests, total.requests, settings.requests_max),
            ("bytes_in_flight_per_principal_max", size, use.size, settings.bytes_in_flight_per_principal_max),
            ("bytes_in_flight_max", size, total.size, settings.bytes_in_flight_max),
            ("streams_per_principal_max", streams, use.streams, settings.streams_per_principal_max),
            ("streams_max", streams, total.streams, settings.streams_max),
            ("consumers_per_principal_max", consumers, use.consumers, settings.consumers_per_principal_max),
            ("consumers_max", consumers, total.consumers, settings.consumers_max),
        ):
            if amount and count + amount > most:
                holder = principal if "principal" in name else "the server"
                self._refuse(name, f"{holder} has {count} under way, and {most} are allowed", RETRY_SECONDS)

    def _check_rates(self, principal: str, use: _Use, requests: int, size: int, now: float) -> None:
        for name, amount, rate in (
            ("requests_per_second_max", requests, use.request_rate),
            ("bytes_per_second_max", size, use.byte_rate),
        ):
            wait_s = rate.wait_s(amount, now) if rate is not None and amount else 0.0
            if wait_s:
                self._refuse(name, f"{principal} has used up its rate", wait_s)

    def _refuse(self, name: str, why: str, retry_after_s: float | None) -> NoReturn:
        self._refused[f"server.{name}"] += 1
        hint = "delete some, or raise it" if retry_after_s is None else f"try again in {retry_after_s:.3g} s"
        raise Throttled(f"server.{name} is reached: {why}; {hint}", limit=f"server.{name}", retry_after_s=retry_after_s)
