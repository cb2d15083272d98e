"""The position of a watch over many topics, as a text that a client hands back to go on: the `id:` of an event.

    id      := "1." base64url without padding of (list topic* crc)
    list    := the first 8 bytes of the BLAKE2b hash of the topics' names, as the request lists them
    topic   := the first 8 bytes of the topic's id, partitions varint, next offset varint per partition
    crc     := u32 of all before it

Topics stand in the order of the request. A watch over another list goes on in the topics that both have, found by their
ids. With the same list a topic that was created again since is seen by its id, and begins again. With offsets of up to
2³⁵ a partition takes at most 5 bytes, so 1,024 of them about 7 KiB.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from forebay.errors import Invalid, UnsupportedFormat
from forebay.format.checksum import crc32
from forebay.records import OFFSET_MAX

WATCHED_TOPICS_MAX: Final = 256
WATCHED_PARTITIONS_MAX: Final = 1024
ID_CHARACTERS_MAX: Final = 24 * 1024
"""More than the longest id: every partition at its last offset."""
_VERSION: Final = "1"
_LIST_BYTES: Final = 8
_TOPIC_ID_BYTES: Final = 8
_CRC: Final = struct.Struct("<I")
_VARINT_BYTES_MAX: Final = 9


class WatchPosition(NamedTuple):
    """How far a watch has come in one topic."""

    incarnation: bytes
    """The beginning of the topic's id."""
    offsets: tuple[int, ...]
    """The next offset of each partition, by number."""

    @classmethod
    def nowhere(cls) -> WatchPosition:
        """That of a topic of which nothing is known."""
        return cls(bytes(_TOPIC_ID_BYTES), ())

    @classmethod
    def of(cls, topic_id: str, offsets: Iterable[int]) -> WatchPosition:
        """The position in the topic with this id."""
        return cls(bytes.fromhex(topic_id)[:_TOPIC_ID_BYTES], tuple(offsets))

    def is_of(self, topic_id: str) -> bool:
        """Whether the topic with this id is the one that was watched, and not one created again under its name."""
        return bytes.fromhex(topic_id)[:_TOPIC_ID_BYTES] == self.incarnation


class WatchPlace(NamedTuple):
    """Where a watch over some topics stands."""

    positions: list[WatchPosition]
    """One for each topic, in the order of its list."""
    is_of_list: bool
    """Whether that is the list that was asked for."""

    def position(self, number: int, topic_id: str) -> WatchPosition | None:
        """Where it stands in a topic of the list that was asked for; `None` if it did not watch the topic.

        With the same list this is the position of the topic of that name, which may be of another id.
        """
        if self.is_of_list:
            return self.positions[number]
        return next((position for position in self.positions if position.is_of(topic_id)), None)


def encode_event_id(names: Sequence[str], watched: Sequence[WatchPosition]) -> str:
    """The id of an event after which the watch over these topics stands here."""
    assert len(names) == len(watched), "one position for each topic"
    check_watch(len(names), sum(len(topic.offsets) for topic in watched))
    parts = bytearray(_list_mark(names))
    for topic in watched:
        parts += topic.incarnation
        _add_varint(parts, len(topic.offsets))
        for offset in topic.offsets:
            _add_varint(parts, offset)
    parts += _CRC.pack(crc32(parts))
    return f"{_VERSION}.{base64.urlsafe_b64encode(parts).rstrip(b'=').decode()}"


def decode_event_id(text: str, names: Sequence[str]) -> list[WatchPosition]:
    """Where a watch over these topics goes on after the event with this id; `Invalid` for one of another list."""
    place = decode_place(text, names)
    if not place.is_of_list:
        raise Invalid("the id belongs to a watch over other topics, or in another order")
    return place.positions


def decode_place(text: str, names: Sequence[str]) -> WatchPlace:
    """Where the watch stood whose event had this id; the watch that goes on may be over other topics, these."""
    version, dot, coded = text.partition(".")
    if not dot or len(text) > ID_CHARACTERS_MAX:
        raise Invalid(f"Last-Event-ID {text!r:.40} is not an id of this broker: leave it out to begin again")
    if version != _VERSION:
        raise UnsupportedFormat(f"Last-Event-ID is of version {version!r:.20}, this broker knows {_VERSION}")
    try:
        content = base64.b64decode(f"{coded}{'=' * (-len(coded) % 4)}", altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise Invalid(f"Last-Event-ID {text!r:.40} is damaged: {error}") from error
    end = len(content) - _CRC.size
    if end < _LIST_BYTES or _CRC.unpack_from(content, end)[0] != crc32(content[:end]):
        raise Invalid(f"Last-Event-ID {text!r:.40} is damaged: leave it out to begin again")
    positions = _positions(content[:end])
    is_of_list = content[:_LIST_BYTES] == _list_mark(names)
    if is_of_list and len(positions) != len(names):
        raise Invalid("Last-Event-ID has more or less in it than its topics")
    return WatchPlace(positions, is_of_list)


def check_watch(topics: int, partitions: int) -> None:
    """`Invalid` for a watch over more than one id can carry."""
    if not 1 <= topics <= WATCHED_TOPICS_MAX or partitions > WATCHED_PARTITIONS_MAX:
        raise Invalid(
            f"a watch over {topics} topics with {partitions} partitions; allowed: 1 to {WATCHED_TOPICS_MAX} topics "
            f"with {WATCHED_PARTITIONS_MAX} partitions in all: open several"
        )


def _positions(content: bytes) -> list[WatchPosition]:
    position = _LIST_BYTES
    found: list[WatchPosition] = []
    partitions_left = WATCHED_PARTITIONS_MAX
    while position < len(content):
        if len(found) == WATCHED_TOPICS_MAX:
            raise Invalid(f"Last-Event-ID names more than {WATCHED_TOPICS_MAX} topics")
        incarnation = content[position : position + _TOPIC_ID_BYTES]
        partitions, position = _varint(content, position + _TOPIC_ID_BYTES)
        partitions_left -= partitions
        if partitions_left < 0:
            raise Invalid(f"Last-Event-ID names more than {WATCHED_PARTITIONS_MAX} partitions")
        offsets = []
        for _ in range(partitions):
            offset, position = _varint(content, position)
            offsets.append(offset)
        found.append(WatchPosition(incarnation, tuple(offsets)))
    return found


def _list_mark(names: Sequence[str]) -> bytes:
    # Each name with its length, so that two lists never give the same text.
    return hashlib.blake2b("".join(f"{len(name)}:{name}" for name in names).encode(), digest_size=_LIST_BYTES).digest()


def _add_varint(parts: bytearray, number: int) -> None:
    assert 0 <= number <= OFFSET_MAX
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """A number and the place behind it."""
    number = 0
    for place, byte in enumerate(content[position : position + _VARINT_BYTES_MAX]):
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return number, position + place + 1
    raise Invalid("Last-Event-ID has a number that does not end")
