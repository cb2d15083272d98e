"""One HTTP request as handlers see it, and the answers they give. Knows ASGI, and nothing of topics."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from difflib import get_close_matches
from functools import lru_cache
from typing import Annotated, Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar, get_args, get_origin
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec

from forebay.decoders import converted, decoder, lenient
from forebay.errors import Invalid, TooLarge
from forebay.service.principals import Principal
from forebay.service.quotas import Admission
from forebay.topics import TopicName
from forebay.wire.messages import TOPIC_ID_HEADER

Event: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Event]]
Send: TypeAlias = Callable[[Event], Awaitable[None]]
T = TypeVar("T", bound=msgspec.Struct)

CHUNKS: Final = "forebay.chunks"
"""The extension of the server that gives an `AnswerWriter`."""
JSON: Final = "application/json"
MESSAGE_BYTES_MAX: Final = 64 * 1024
"""The largest body that brings no records."""
LEFT_BYTES_MAX: Final = 256 * 1024
"""So much of a body that no handler has taken is read and thrown away, so that the connection can be used again."""
NO_ONE: Final = Principal(name="-", scopes=frozenset(), prefixes=frozenset())
LOGGED_CHARACTERS_MAX: Final = 300
"""What a log line has of a name that a client has sent."""
_TOPIC_ID: Final = TOPIC_ID_HEADER.encode()
FIELDS_MAX: Final = 512
"""Parameters that a query may have: a watch names up to 256 topics."""


class Disconnected(Exception):
    """The client has gone; no answer reaches it."""


class HttpAnswer(NamedTuple):
    """What is sent back, all at once."""

    status: int
    body: bytes = b""
    media_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, message: msgspec.Struct, status: int = 200) -> HttpAnswer:
        """A message as JSON."""
        return cls(status, msgspec.json.encode(message))


class SeenBytes(Protocol):
    """Counts what is sent."""

    sent: int


class AnswerWriter(Protocol):
    """Writes ready chunks of an answer to its connection, beside the pieces that are sent."""

    @property
    def has_room(self) -> bool:
        """Whether the answer goes on, and its client takes what is sent."""

    def write(self, chunk: bytes) -> None:
        """Send a chunk; only while there is room."""


class Streamed(NamedTuple):
    """What is sent back piece by piece, until the pieces end or the client goes."""

    pieces: AsyncGenerator[bytes, None]
    media_type: str
    headers: tuple[tuple[str, str], ...]
    held: AbstractContextManager[object]
    """What the stream uses as long as it lasts: left when it is over, also if no piece was sent."""
    status: int = 200
    begin: Callable[[AnswerWriter, SeenBytes], None] | None = None
    """Called when the head is sent: from then on the stream may write chunks while no piece of it is being sent."""


class Request:
    """One request. For one task."""

    __slots__ = (
        "_extensions",
        "_headers",
        "_is_taken",
        "_query",
        "_receive",
        "_taken",
        "admission",
        "at",
        "client",
        "length",
        "method",
        "offset",
        "partition",
        "path",
        "principal",
    )

    def __init__(self, scope: Mapping[str, Any], receive: Receive) -> None:
        self.method: str = scope["method"]
        self.path: bytes = scope.get("raw_path") or scope["path"].encode()
        """As it was sent: what is encoded is decoded part by part, so that no part becomes two."""
        self.at: Mapping[str, str] = {}
        """The parts of the path that a route names: namespace, topic, group, load, router, subscription, consumer."""
        self.principal = NO_ONE
        """Who calls: set before a handler runs, for routes that ask for a right."""
        self.admission: Admission | None = None
        """What counts for the caller while the request is under way: set after `principal`."""
        self.partition: int | None = None
        """The partition that the request turned out to be about, for the log."""
        self.offset: int | None = None
        """The first offset of it, for the log."""
        self.client: str = scope["client"][0] if scope.get("client") else "-"
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._extensions: Mapping[str, Any] = scope.get("extensions") or {}
        self._query: bytes = scope.get("query_string", b"")
        self._receive = receive
        self._taken = 0
        """Bytes of the body that a handler has got."""
        self._is_taken = False
        """Whether that is all of it."""
        length = self._headers.get(b"content-length")
        self.length = int(length) if length is not None and length.isdigit() else None
        """How many bytes the body has, if the client says so."""

    def answer_writer(self) -> AnswerWriter | None:
        """What writes ready chunks of its answer, if the server offers that."""
        make: Callable[[], AnswerWriter] | None = self._extensions.get(CHUNKS, {}).get(CHUNKS)
        return None if make is None else make()

    def header(self, name: bytes) -> str | None:
        """A header by its name in small letters, if it was sent."""
        found = self._headers.get(name)
        return None if found is None else found.decode("latin-1")

    def check_query(self, kind: type[msgspec.Struct]) -> None:
        """`Invalid` names a parameter that the query of the address has and the struct has not, and the nearest one."""
        known = [field.encode_name for field in msgspec.structs.fields(kind)] if self._query else []
        for name, _ in self._pairs():
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise Invalid(
                    f"{name!a:.80} is no parameter of this route: {hint}parameters: {', '.join(known) or 'none'}"
                )

    def _pairs(self) -> list[tuple[str, str]]:
        """The parameters of the query as they were sent."""
        if not self._query:
            return []
        try:
            return parse_qsl(
                self._query.decode("ascii"),
                keep_blank_values=True,
                strict_parsing=True,
                errors="strict",
                max_num_fields=FIELDS_MAX,
            )
        except ValueError as error:
            raise Invalid(f"the query of the address cannot be read: {error}") from error

    def query(self, kind: type[T]) -> T:
        """The parameters of the query, as the fields of a struct; `Invalid` names one that is wrong or unknown."""
        if not self._query:
            return _converted({}, kind)
        lists = _list_fields(kind)
        found: dict[str, Any] = {}
        for name, value in self._pairs():
            if name in lists:
                found.setdefault(name, []).append(value)
            elif name in found:
                raise Invalid(f"the query names {name!a:.80} twice")
            else:
                found[name] = value
        return _converted(found, kind)

    @property
    def topic(self) -> TopicName:
        """The topic that the path names; `Invalid` if it cannot be a name."""
        return TopicName(self.at["namespace"], self.at["topic"], self.header(_TOPIC_ID))

    def topic_named(self, text: str) -> TopicName:
        """The one topic that a query or body names; `Invalid` if it cannot be a name."""
        name = TopicName.parse(text)
        return TopicName(name.namespace, name.topic, self.header(_TOPIC_ID))

    def topics_named(self, texts: Iterable[str]) -> list[TopicName]:
        """Topics that a query names, each once; only one of them alone may be meant by its id."""
        # Names first: one topic may be written in two ways.
        names = list(dict.fromkeys(TopicName.parse(text) for text in texts))
        if self.header(_TOPIC_ID) is None:
            return names
        if len(names) > 1:
            raise Invalid(f"{TOPIC_ID_HEADER} is the id of one topic, and the query names {len(names)}: leave it out")
        return [self.topic_named(str(name)) for name in names]

    def place(self) -> dict[str, str | int]:
        """What the request is about, as far as it is known, as fields of a log line."""
        found: dict[str, str | int] = {}
        if "topic" in self.at:
            found["topic"] = _printable(f"{self.at['namespace']}/{self.at['topic']}")
        if "group" in self.at:
            found["group"] = _printable(self.at["group"])
        for name in ("load", "router", "subscription", "consumer"):
            if name in self.at:
                found[name] = _printable(self.at[name])
        if self.partition is not None:
            found["partition"] = self.partition
        if self.offset is not None:
            found["offset"] = self.offset
        return found

    @property
    def admitted(self) -> Admission:
        """What counts for the caller, for handlers."""
        assert self.admission is not None, "a request is admitted before its handler runs"
        return self.admission

    @property
    def is_much_left(self) -> bool:
        """Whether so much of the body may come yet that its connection is better closed: no handler wants it."""
        if self._is_taken:
            return False
        if b"transfer-encoding" in self._headers:
            return True
        return (self.length or 0) - self._taken > LEFT_BYTES_MAX

    async def body(self, bytes_max: int, limit: str) -> bytes:
        """All of the body; `TooLarge`, which names the `limit`, before more than `bytes_max` are kept.

        A body whose length the client did not say counts for the caller piece by piece, which may be refused.
        """
        length = self.length
        if length is not None and length > bytes_max:
            raise _too_large(bytes_max, limit, length)
        # Not a list of pieces: a client may send them as small as it likes.
        kept = bytearray()
        while True:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise Disconnected
            piece: bytes = event.get("body", b"")
            self._taken += len(piece)
            self._is_taken = not event.get("more_body", False)
            if self._taken > bytes_max:
                raise _too_large(bytes_max, limit, None)
            if piece and length is None:
                self.admitted.grow(len(piece))
            if self._is_taken and not kept:
                return piece
            kept += piece
            if self._is_taken:
                return bytes(kept)

    async def json(self, kind: type[T], *, default: T | None = None, bytes_max: int = MESSAGE_BYTES_MAX) -> T:
        """The body as JSON of this kind; `default` for an empty one. For small bodies."""
        body = await self.body(bytes_max, "the most that a request without records may bring")
        if not body and default is not None:
            return default
        try:
            return lenient(body, decoder(kind).decode)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            fields = ", ".join(field.encode_name for field in msgspec.structs.fields(kind))
            raise Invalid(f"the body is wrong: {error}; it is a JSON object with: {fields}") from error


def path_parts(path: bytes) -> list[str] | None:
    """The parts of a path, decoded; `None` if one of them cannot be a part: not text, empty, or with a slash inside."""
    sent = path.split(b"/")[1:]
    is_encoded = b"%" in path
    try:
        parts = [part.decode() for part in (map(unquote_to_bytes, sent) if is_encoded else sent)]
    except UnicodeDecodeError:
        return None
    if "" in parts or b"\0" in path or (is_encoded and any("/" in part or "\0" in part for part in parts)):
        return None
    return parts


def _printable(text: str) -> str:
    """A text of a client for one line of a log."""
    return text if len(text) <= LOGGED_CHARACTERS_MAX and text.isprintable() else f"{text!a:.{LOGGED_CHARACTERS_MAX}}"


def _too_large(bytes_max: int, limit: str, size: int | None) -> TooLarge:
    said = "" if size is None else f" of {size} bytes"
    return TooLarge(
        f"the body{said} is larger than {bytes_max} bytes ({limit}): send it in parts", size=size, limit=bytes_max
    )


def _converted(found: dict[str, Any], kind: type[T]) -> T:
    try:
        return converted(found, kind, strict=False)
    except msgspec.ValidationError as error:
        allowed = ", ".join(field.encode_name for field in msgspec.structs.fields(kind))
        raise Invalid(f"the query of the address is wrong: {error}; parameters: {allowed or 'none'}") from error


@lru_cache
def _list_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    """The parameters that may be given several times."""
    found = set()
    for field in msgspec.structs.fields(kind):
        plain = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
        if get_origin(plain) in (list, tuple):
            found.add(field.encode_name)
    return frozenset(found)
