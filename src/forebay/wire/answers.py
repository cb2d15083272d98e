"""A page of a partition as the answer to a read: JSON, JSON lines, Arrow, or frames as they are stored.

Gaps stand in their place: `{"gap": …}` among the records of JSON, the metadata `forebay.gaps` of the Arrow batch that
follows them (of an empty one at the end), gap frames between frames. Where the partition stood is in the answer itself
(JSON, frames) or in headers of the answer (JSON lines, Arrow).

    page := "FBYPAGE" 1 u8, partition u32, frames u32, next u64, head u64, earliest u64, evict_floor u64, crc u32,
            0 u32, frame*

The frames are those of `format.frame`: their columns are not encoded again, they get a head and a crc with a salt of
their own. The decoders are for the client: an answer that is not sound was cut or changed on its way, so they raise
`Unavailable`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET

from forebay.decoders import decoder
from forebay.errors import Corrupt, Invalid, Unavailable, UnsupportedFormat
from forebay.format.checksum import crc32, salted
from forebay.format.control.frames import decode_gap, encode_gap
from forebay.format.frame.batch import Batch, batch_of, decode, encode_data_frame, merge
from forebay.format.frame.head import Kind, Verdict, read_frame
from forebay.records import Bytes, Gap, RecordPage
from forebay.wire.items import GapItem, RecordItem, items_of, record_of
from forebay.wire.limits import BodyLimits

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

GAPS_KEY: Final = "forebay.gaps"
MERGED_ROWS: Final = 4096
"""Small batches that follow each other become one of so many rows: what a batch costs is not paid for each record."""
_MAGIC: Final = b"FBYPAGE\x01"
_HEAD: Final = struct.Struct("<8sIIQQQQ")
_CRC: Final = struct.Struct("<II")
_SALT_CRC: Final = salted(b"forebay.frames.1")
assert _HEAD.size + _CRC.size == 56


class PageMarks(NamedTuple):
    """Where a partition stood when a page of it was read; `next` is where to ask again."""

    next: int
    head: int
    earliest: int
    evict_floor: int

    @property
    def caught_up(self) -> bool:
        """Whether there was nothing more to read."""
        return self.next >= self.head

    def headers(self) -> dict[str, str]:
        """The same as headers of an answer."""
        numbers = {f"forebay-{field.replace('_', '-')}": str(value) for field, value in self._asdict().items()}
        return {**numbers, "forebay-caught-up": "true" if self.caught_up else "false"}

    @classmethod
    def of_headers(cls, headers: Mapping[str, str]) -> PageMarks:
        """The marks that an answer's headers, by lower-case name, carry."""
        try:
            return cls(*[int(headers[f"forebay-{field.replace('_', '-')}"]) for field in cls._fields])
        except (KeyError, ValueError) as error:
            raise Unavailable(f"the answer does not say where the partition stands: {error}") from error


class BatchPage(NamedTuple):
    """Records of one partition by column, the gaps between them, and where the partition stood."""

    partition: int
    batches: Sequence[Batch]
    gaps: Sequence[Gap]
    marks: PageMarks

    def records(self) -> RecordPage:
        """The same, with an object for each record."""
        records = [record for batch in self.batches for record in batch.records(self.partition)]
        return RecordPage(records, self.gaps, *self.marks)


class ArrowPage(NamedTuple):
    """The same as record batches of Arrow."""

    batches: Sequence[pa.RecordBatch]
    gaps: Sequence[Gap]
    marks: PageMarks


class PageBody(msgspec.Struct):
    """A page in one JSON object."""

    records: list[RecordItem]
    next: int
    earliest: int
    evict_floor: int
    head: int
    caught_up: bool


_ENCODER: Final = msgspec.json.Encoder()
_PAGE_DECODER: Final = decoder(PageBody)
_ITEM_DECODER: Final = decoder(RecordItem)
_GAPS_DECODER: Final = decoder(list[GapItem])


# JSON


def batch_page_items(page: BatchPage) -> list[RecordItem]:
    """Records and gaps of a page as they are written, in order."""
    found: list[RecordItem] = []
    for piece in _in_order(_merged(page.batches), page.gaps):
        if isinstance(piece, Gap):
            found.append(RecordItem(gap=GapItem.of(page.partition, piece)))
        else:
            found += items_of(piece, page.partition)
    return found


def encode_page_json(items: list[RecordItem], marks: PageMarks) -> bytes:
    """A page as one JSON object."""
    next_, head, earliest, evict_floor = marks
    return _ENCODER.encode(PageBody(items, next_, earliest, evict_floor, head, marks.caught_up))


def decode_page_json(body: bytes) -> RecordPage:
    """The page of a JSON object."""
    found = _sound(lambda: _PAGE_DECODER.decode(body))
    return _record_page(found.records, PageMarks(found.next, found.head, found.earliest, found.evict_floor))


def encode_page_ndjson(items: list[RecordItem]) -> bytes:
    """A page as JSON lines; where the partition stood is in the headers."""
    return _ENCODER.encode_lines(items)


def decode_page_ndjson(body: bytes, marks: PageMarks) -> RecordPage:
    """The page of JSON lines."""
    return _record_page(_sound(lambda: _ITEM_DECODER.decode_lines(body)), marks)


def _record_page(items: Sequence[RecordItem], marks: PageMarks) -> RecordPage:
    records = _sound(lambda: [record_of(item) for item in items if item.gap is UNSET])
    gaps = _sound(lambda: [item.gap.gap() for item in items if item.gap is not UNSET])
    return RecordPage(records, gaps, *marks)


# Arrow


def encode_page_arrow(page: BatchPage) -> bytes:
    """A page as an Arrow IPC stream with the columns that `read_arrow` gives."""
    import pyarrow as pa  # noqa: PLC0415 - loaded only where it is used

    from forebay.format.columns.arrow import ARROW_SCHEMA  # noqa: PLC0415
    from forebay.wire.arrow_streams import write_stream  # noqa: PLC0415

    batches: list[tuple[pa.RecordBatch, Mapping[str, str] | None]] = []
    gaps: list[GapItem] = []
    for piece in _in_order(_merged(page.batches), page.gaps):
        if isinstance(piece, Gap):
            gaps.append(GapItem.of(page.partition, piece))
        else:
            batches.append((piece.to_arrow(page.partition), _metadata(gaps)))
            gaps = []
    if gaps:
        batches.append((pa.RecordBatch.from_pylist([], schema=ARROW_SCHEMA), _metadata(gaps)))
    return write_stream(batches, ARROW_SCHEMA)


def decode_page_arrow(body: bytes, marks: PageMarks, limits: BodyLimits) -> ArrowPage:
    """The page of an Arrow IPC stream. Batches without rows carry gaps alone and are left out."""
    from forebay.wire.arrow_streams import read_stream  # noqa: PLC0415 - loaded only where it is used

    batches: list[pa.RecordBatch] = []
    gaps: list[Gap] = []
    for batch, metadata in _sound(lambda: read_stream(body, limits)):
        stored = (metadata or {}).get(GAPS_KEY.encode())
        if stored is not None:
            gaps += _sound(lambda found=stored: [item.gap() for item in _GAPS_DECODER.decode(found)])  # type: ignore[misc]
        if batch.num_rows:
            batches.append(batch)
    return ArrowPage(batches, gaps, marks)


def _metadata(gaps: Sequence[GapItem]) -> dict[str, str] | None:
    return {GAPS_KEY: _ENCODER.encode(gaps).decode()} if gaps else None


# Frames


def encode_page_frames(page: BatchPage) -> bytes:
    """A page as frames."""
    frames = [_frame(piece) for piece in _in_order(_merged(page.batches), page.gaps)]
    head = _HEAD.pack(_MAGIC, page.partition, len(frames), *page.marks)
    return b"".join([head, _CRC.pack(crc32(head), 0), *frames])


def decode_page_frames(body: bytes) -> BatchPage:
    """The page of frames; its batches refer to the bytes of the body."""
    if len(body) < _HEAD.size + _CRC.size or _CRC.unpack_from(body, _HEAD.size) != (crc32(body[: _HEAD.size]), 0):
        raise Unavailable(f"the answer of {len(body)} bytes is no page of frames: it was cut or changed on its way")
    magic, partition, count, *numbers = _HEAD.unpack_from(body)
    if magic != _MAGIC:
        raise UnsupportedFormat("the answer is a page of frames of another version: upgrade the client")
    batches: list[Batch] = []
    gaps: list[Gap] = []
    position = _HEAD.size + _CRC.size
    for _ in range(count):
        found = read_frame(body, position, _SALT_CRC, len(body))
        if found is Verdict.NEWER:
            raise UnsupportedFormat("the answer holds frames of another version: upgrade the client")
        if isinstance(found, Verdict):
            raise Unavailable(f"the answer is {found.value} at byte {position} of {len(body)}: ask again")
        if found.kind == Kind.DATA:
            batches.append(_sound(lambda at=position, head=found: decode(body, at, head)))  # type: ignore[misc]
        elif found.kind == Kind.GAP:
            gaps.append(_sound(lambda at=position, head=found: decode_gap(body, at, head)))  # type: ignore[misc]
        position += found.length
    if position != len(body):
        raise Unavailable(f"{len(body) - position} bytes follow the end of the answer: ask again")
    return BatchPage(partition, batches, gaps, PageMarks(*numbers))


def _frame(piece: Batch | Gap) -> Bytes:
    if isinstance(piece, Gap):
        return encode_gap(piece, salt_crc=_SALT_CRC, next_offset=piece.stop, epoch=0, durable=0, appended_at=0)
    return encode_data_frame(
        salt_crc=_SALT_CRC,
        base=piece.base,
        epoch=piece.epoch,
        durable=0,
        appended_at=piece.appended_at,
        runs=(),
        columns=piece.columns_bytes(),
        zstd_level=None,
    )


# Pieces of a page


def _in_order(batches: Sequence[Batch], gaps: Sequence[Gap]) -> Iterator[Batch | Gap]:
    if not gaps:
        return iter(batches)
    pieces: list[Batch | Gap] = [*batches, *gaps]
    return iter(sorted(pieces, key=lambda piece: piece.start if isinstance(piece, Gap) else piece.base))


def _merged(batches: Sequence[Batch]) -> list[Batch]:
    """Batches that follow each other put together, up to `MERGED_ROWS` each; a gap parts two, so they do not touch."""
    found: list[Batch] = []
    group: list[Batch] = []
    rows = 0
    for batch in batches:
        if group and (group[-1].end != batch.base or rows + batch.count > MERGED_ROWS):
            found.append(_joined(group))
            group, rows = [], 0
        group.append(batch)
        rows += batch.count
    if group:
        found.append(_joined(group))
    return found


def _joined(group: Sequence[Batch]) -> Batch:
    first, last = group[0], group[-1]
    if first is last:
        return first
    return batch_of(merge(group), base=first.base, epoch=last.epoch, appended_at=last.appended_at)


def _sound(read: Callable[[], T]) -> T:
    """What `read` makes of an answer; `Unavailable` if that is not what a broker sends."""
    try:
        return read()
    except UnsupportedFormat:
        raise
    except (msgspec.MsgspecError, UnicodeDecodeError, Invalid, Corrupt) as error:
        raise Unavailable(f"the answer is not sound: {error}; ask again") from error
