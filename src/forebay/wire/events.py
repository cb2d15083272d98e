"""Server-sent events: how a broker writes a stream of them, and how a client reads it, cut at any byte.

Records and gaps are events with JSON as their text. A comment now and then says that the broker is still there.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from forebay.errors import Unavailable

HEARTBEAT: Final = b":\n\n"
"""A comment: readers of the stream ignore it."""
GAP_EVENT: Final = "gap"
ERROR_EVENT: Final = "error"
"""An error, by its body: of one topic that was deleted, or the last event of a stream that ends by it."""
EVENT_BYTES_MAX: Final = 64 * 1024 * 1024
"""More than any record can take."""
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_MARK: Final = b"\xef\xbb\xbf"


class ServerEvent(NamedTuple):
    """One event as a client gets it. `event` is `message` where the stream names none."""

    event: str
    text: bytes
    event_id: str
    """The newest id of the stream, that of this event or of an earlier one."""


def encode_event(text: bytes, *, event: str | None = None, event_id: str | None = None) -> bytes:
    """One event; the text may have lines, which come out joined by new lines."""
    parts = [] if event is None else [b"event: ", event.encode(), b"\n"]
    for line in _LINE_END.split(text) if b"\n" in text or b"\r" in text else (text,):
        parts += (b"data: ", line, b"\n")
    if event_id is not None:
        parts += (b"id: ", event_id.encode(), b"\n")
    parts.append(b"\n")
    return b"".join(parts)


def encode_retry(milliseconds: int) -> bytes:
    """How long a reader waits before it connects again."""
    return b"retry: %d\n\n" % milliseconds


class EventDecoder:
    """Reads one stream of events from its chunks. For one connection; the next one begins with a new decoder."""

    def __init__(self, event_id: str = "", *, bytes_max: int = EVENT_BYTES_MAX) -> None:
        """`event_id` is where the stream goes on; an event of more than `bytes_max` bytes is refused."""
        self._bytes_max = bytes_max
        self._begun: list[bytes] = []
        """Pieces of a line whose end has not come yet."""
        self._size = 0
        """Bytes of the event that is being read."""
        self._after_return = False
        self._is_first = True
        self._event = ""
        self._lines: list[bytes] = []
        self._id = event_id
        self.event_id = event_id
        """The id to hand back: that of the last event whose end has come."""
        self.retry_ms: int | None = None
        """How long the broker asks to wait before the next connection."""

    def feed(self, chunk: bytes) -> list[ServerEvent]:
        """The events that end in this chunk."""
        found: list[ServerEvent] = []
        if self._after_return and chunk:
            # The second half of an end of line that was cut in two.
            chunk = chunk.removeprefix(b"\n") if chunk[:1] == b"\n" else chunk
            self._after_return = False
        if chunk:
            self._after_return = chunk[-1:] == b"\r"
        *ended, rest = _LINE_END.split(chunk)
        for line in ended:
            self._grow(len(line) + 1)
            self._begun.append(line)
            event = self._line(b"".join(self._begun))
            self._begun.clear()
            if event is not None:
                found.append(event)
        if rest:
            self._grow(len(rest))
            self._begun.append(rest)
        return found

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > self._bytes_max:
            raise Unavailable(f"the stream has an event of more than {self._bytes_max} bytes")

    def _line(self, line: bytes) -> ServerEvent | None:
        if self._is_first:
            self._is_first = False
            line = line.removeprefix(_MARK)
        if not line:
            return self._end()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._lines.append(value)
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")
        elif name == b"id" and b"\0" not in value:
            self._id = value.decode("utf-8", "replace")
        elif name == b"retry" and value.isdigit() and len(value) < 10:
            self.retry_ms = int(value)
        elif not name:
            # A comment: a stream of nothing but these goes on for ever.
            self._size -= len(line) + 1
        return None

    def _end(self) -> ServerEvent | None:
        """The event that an empty line ends; none if it has no text."""
        lines, event = self._lines, self._event
        self._lines, self._event, self._size = [], "", 0
        self.event_id = self._id
        if not lines:
            return None
        return ServerEvent(event or "message", b"\n".join(lines), self._id)
