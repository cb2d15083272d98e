"""Samples for the tests of the format room: rows as hypothesis draws them, and one artefact of each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from hypothesis import strategies as st

from forebay.errors import Corrupt
from forebay.format.checksum import content_hash, salted
from forebay.format.columns.rows import ColumnBytes, Row, encode_rows
from forebay.format.columns.times import Appended, timed
from forebay.format.control import frames as control
from forebay.format.control.offsets import WINDOW, OffsetSet
from forebay.format.files import checkpoint, live, segment
from forebay.format.frame.batch import Batch, batch_of, decode, encode_data_frame
from forebay.format.frame.encoding import runs_of
from forebay.format.frame.head import FrameHead, Kind, Verdict, read_frame
from forebay.format.frame.scan import scan_frames
from forebay.format.index import sections as index
from forebay.format.index.hashing import hash_bytes, hash_text
from forebay.format.index.lookups import LookupSections
from forebay.format.index.postings import Postings
from forebay.format.metadata import descriptor, value, vectors
from forebay.records import Gap, Reason, Record, Run

SALT: Final = bytes(range(16))
SALT_CRC: Final = salted(SALT)
FRAME_MAX: Final = 1024 * 1024
STAMP: Final = {"salt_crc": SALT_CRC, "next_offset": 42, "epoch": 3, "durable": 40, "appended_at": 1_700_000_000_123}
TOPIC_ID: Final = "00112233445566778899aabbccddeeff"

INT64: Final = st.integers(-(2**63), 2**63 - 1)
TEXT: Final = st.text(max_size=12)
BINARY: Final = st.binary(max_size=20)
HEADERS: Final = st.lists(st.tuples(TEXT, st.none() | BINARY), max_size=3).map(tuple)
ROW: Final[st.SearchStrategy[Row]] = st.tuples(
    st.none() | BINARY, st.none() | BINARY, st.none() | TEXT, st.just(()) | HEADERS, INT64
)
PLAIN_ROW: Final[st.SearchStrategy[Row]] = st.tuples(BINARY, st.none(), st.none(), st.just(()), INT64)
ROWS: Final = st.lists(ROW, min_size=1, max_size=40) | st.lists(PLAIN_ROW, min_size=1, max_size=40)

ONE_ROW: Final[list[Row]] = [(b"paid", None, None, (), 1_700_000_000_000)]
FULL_ROWS: Final[list[Row]] = [
    (b"paid", b"42", "eu", (("trace", b"\x01\x02"), ("note", None)), 1_700_000_000_000),
    (None, None, None, (), -1),
    (b"", b"", "\u00e9\u20ac", (("trace", b""),), 1_700_000_000_002),
]


def whole(columns: ColumnBytes) -> bytes:
    """The encoded columns as one piece."""
    joined = b"".join(columns.parts)
    assert len(joined) == columns.size
    return joined


def frame_of(
    rows: list[Row],
    *,
    base: int = 7,
    runs: tuple[Run, ...] = (),
    zstd_level: int | None = None,
    salt_crc: int = SALT_CRC,
    times: Sequence[Appended] = (),
) -> bytes:
    """A data frame of these rows."""
    frame = encode_data_frame(
        salt_crc=salt_crc,
        base=base,
        epoch=3,
        durable=5,
        appended_at=1_700_000_000_123,
        runs=runs,
        columns=timed(encode_rows(rows), times),
        zstd_level=zstd_level,
    )
    return bytes(frame)


def batches_of_rows(groups: list[list[Row]], first: int) -> list[Batch]:
    """One batch of each group of rows, with offsets from `first` on."""
    batches = []
    for rows in groups:
        batches.append(batch_of(encode_rows(rows), base=first, epoch=3, appended_at=1_700_000_000_123))
        first += len(rows)
    return batches


def head_of(frame: bytes) -> FrameHead:
    """The head of a frame that must be whole."""
    head = read_frame(frame, 0, SALT_CRC, FRAME_MAX)
    assert isinstance(head, FrameHead)
    return head


def row_of(record: Record) -> Row:
    """The row that a record was made from."""
    return record.value, record.key, record.tag, record.headers, record.timestamp


class Artefact(NamedTuple):
    """Bytes, how to read them back, and what must come out."""

    encoded: bytes
    read: Callable[[bytes], Any]
    expected: Any
    stable: bool = True
    """Whether encoding again must give the same bytes: what zstd makes may change with its version."""


def read_records(buffer: bytes) -> Any:
    """Head, runs and records of a data frame, or the verdict."""
    head = read_frame(buffer, 0, SALT_CRC, FRAME_MAX)
    if isinstance(head, Verdict):
        return head
    if head.length != len(buffer) or head.kind != Kind.DATA:
        raise Corrupt("not the frame that was written")
    batch = decode(buffer, 0, head)
    return head, runs_of(buffer, 0, head), batch.records(0)


def read_times(buffer: bytes) -> Any:
    """Head and records of a data frame and when they were appended, or the verdict."""
    found = read_records(buffer)
    return found if isinstance(found, Verdict) else (found[0], found[2], decode(buffer, 0, found[0]).appended())


def read_control(buffer: bytes) -> Any:
    """Head and content of a control frame, or the verdict."""
    head = read_frame(buffer, 0, SALT_CRC, FRAME_MAX)
    if isinstance(head, Verdict):
        return head
    read: Callable[[bytes, int, FrameHead], Any] = {
        Kind.STATE: control.decode_state,
        Kind.GAP: control.decode_gap,
        Kind.MARK: control.decode_mark,
        Kind.DELETE: control.decode_delete,
        Kind.FLOOR: control.decode_floor,
    }[Kind(head.kind)]
    return head, read(buffer, 0, head)


def read_segment(buffer: bytes) -> Any:
    """Header and heads of a whole segment file, or the first verdict that is not whole."""
    header = segment.decode_header(buffer)
    if isinstance(header, Verdict):
        return header
    scan = scan_frames(buffer, segment.HEADER_BYTES, salted(header.salt), FRAME_MAX)
    return scan.verdict if scan.verdict is not Verdict.WHOLE else (header, scan.heads)


def read_index(buffer: bytes) -> Any:
    """Footer, entries as tuples, and gaps, or the verdict."""
    found = index.decode_index(buffer)
    if isinstance(found, Verdict):
        return found
    footer, entries, gaps = found
    return footer, entries.tolist(), gaps


def section_bytes(buffer: bytes) -> dict[int, tuple[index.Section, bytes]]:
    """The sections of an index by kind, found piece by piece."""
    found = index.read_sections(lambda position, length: buffer[position : position + length], len(buffer))
    if isinstance(found, Verdict):
        raise Corrupt(f"the footer is {found.value}")
    return {section.kind: (section, buffer[section.position :][: section.length]) for section in found[1]}


def read_lookups(buffer: bytes) -> Any:
    """All that an index with look-ups holds, or the verdict; postings as records by what was looked up."""
    found = read_index(buffer)
    if isinstance(found, Verdict):
        return found
    sections = section_bytes(buffer)
    section, sizes = sections[index.SectionKind.SIZES]
    answers: list[Any] = [*found, index.decode_sizes(sizes, section).tolist()]
    for kind, hashes in (
        (index.SectionKind.KEY_POSTINGS, [hash_bytes(key) for key in LOOKUP_KEYS]),
        (index.SectionKind.TAG_POSTINGS, [hash_text(tag) for tag in LOOKUP_TAGS]),
    ):
        postings = Postings(lambda position, length: buffer[position : position + length], sections[kind][0])
        answers.append([[part.tolist() for part in postings.find(wanted)] for wanted in hashes])
    return tuple(answers)


def _head(frame: bytes, kind: Kind, *, base: int = 42, durable: int = 40) -> FrameHead:
    return FrameHead(base, len(frame), kind, 0, 0, 0, 3, 0, durable, 1_700_000_000_123)


STATE: Final = control.State(
    reserved_end=65_578,
    previous_end=42,
    earliest=7,
    evict_floor=3,
    identity="boot-1/mount-2",
    window=(control.WindowEntry(9, 0, 1000, 2, 5), control.WindowEntry(2**64 - 1, 2**64 - 1, 1, 1, 41)),
    restated=True,
)
GAP: Final = Gap(30, 42, Reason.LOST)
DELETED: Final = OffsetSet.of([3, 5, 7, WINDOW - 1]) | OffsetSet.of_range(WINDOW, WINDOW + 5000)
FLOOR: Final = control.Floor(40, 30, Reason.CAP)
HEADER: Final = segment.SegmentHeader(TOPIC_ID, 5, 3, 42, 1_700_000_000_123, SALT)
ENTRY_ROWS: Final = [(42, 64, 168, 1, 10, 20), (43, 232, 4096, 100, 5, 15), (150, 4328, 88, 3, 30, 40)]
FOOTER: Final = index.Footer(
    epoch=3,
    epoch_max=4,
    start=42,
    end=153,
    frames=3,
    records=104,
    time_min=5,
    time_max=40,
    appended_max=1_700_000_000_200,
    segment_bytes=4416,
    segment_crc=0xDEADBEEF,
    content_hash=content_hash([b"segment"]),
)
LOOKUP_KEYS: Final = [b"42", b"", b"43"]
LOOKUP_TAGS: Final = ["eu", "\u00e9\u20ac"]
LOOKUP_ROWS: Final[list[list[Row]]] = [FULL_ROWS, [(b"x", b"42", "eu", (), 5), (b"yz", b"43", None, (), 6)]]
VECTOR: Final = vectors.vectors_of(DELETED, 7)[1]
CHECKPOINT: Final = checkpoint.Checkpoint(
    files=(checkpoint.CheckpointFile(0, 1, 42), checkpoint.CheckpointFile(42, 3, 153)),
    durable=150,
    rotated_at=1_700_000_000_000,
    clean=True,
    clean_position=4480,
)
LIVE: Final = live.Live(4, 3, 42, 4416, 150, 153, 77)
SHARD_STATE: Final = descriptor.ShardState(
    incarnation=TOPIC_ID, epoch=4, owner="session-1", holder="directory-1", holder_since=3, reserved_end=65_578
)
FLOORED_STATE: Final = msgspec.structs.replace(SHARD_STATE, earliest=40, evict_floor=17, floor_reason=5, deletes=3)
DESCRIPTOR: Final = descriptor.SegmentDescriptor(
    kind=descriptor.DescriptorKind.FRAMES,
    topic_id=TOPIC_ID,
    start=42,
    end=153,
    epoch=3,
    segment_id="0000000000000000042-3",
    bytes=4416,
    records=104,
    live_records=104,
    time_min=5,
    time_max=40,
    content_hash=content_hash([b"segment"]).hex(),
    store="history",
    object_key="00112233445566778899aabbccddeeff_5/3-abc.seg",
    etag='"abc"',
    leader="broker-1",
    status=descriptor.Status.EXPORTED,
    created_at=1_700_000_000_300,
    header_start=42,
    sparse=(descriptor.SparseEntry(0, 64), descriptor.SparseEntry(108, 4328)),
)


def _data_artefacts() -> dict[str, Artefact]:
    runs = (Run(2, 9, 4), Run(1, 0, 0))
    many: list[Row] = [(b"value %d" % (i % 5), b"key", "tag", (), i) for i in range(200)]
    frames = {
        "frame-one.bin": (ONE_ROW, (), frame_of(ONE_ROW), True),
        "frame-full.bin": (FULL_ROWS, runs, frame_of(FULL_ROWS, runs=runs), True),
        "frame-zstd.bin": (many, (), frame_of(many, zstd_level=1), False),
    }
    found = {}
    for name, (rows, expected_runs, frame, stable) in frames.items():
        columns = encode_rows(rows)
        codec = 0 if stable else 1
        head = FrameHead(7, len(frame), 0, codec, columns.flags, len(rows), 3, len(expected_runs), 5, 1_700_000_000_123)
        records = [
            Record(0, 7 + i, time, key, stored, tag, headers)
            for i, (stored, key, tag, headers, time) in enumerate(rows)
        ]
        found[name] = Artefact(frame, read_records, (head, list(expected_runs), records), stable)
    times = [Appended(1, 1_700_000_000_100), Appended(2, 1_700_000_000_123)]
    frame = frame_of(FULL_ROWS, times=times)
    head, _, records = found["frame-full.bin"].expected
    head = head._replace(length=len(frame), columns=255, run_count=0)
    found["frame-times.bin"] = Artefact(frame, read_times, (head, records, times))
    return found


def _control_artefacts() -> dict[str, Artefact]:
    state = control.encode_state(STATE, frame_bytes_max=FRAME_MAX, **STAMP)[0]
    gap = control.encode_gap(GAP, **STAMP)
    mark = control.encode_mark(clean=True, **STAMP)
    (delete,) = control.encode_delete(DELETED, frame_bytes_max=FRAME_MAX, **STAMP)
    floor = control.encode_floor(FLOOR, **STAMP)
    return {
        "frame-delete.bin": Artefact(delete, read_control, (_head(delete, Kind.DELETE), DELETED)),
        "frame-floor.bin": Artefact(floor, read_control, (_head(floor, Kind.FLOOR), FLOOR)),
        "frame-state.bin": Artefact(state, read_control, (_head(state, Kind.STATE), STATE)),
        "frame-gap.bin": Artefact(gap, read_control, (_head(gap, Kind.GAP), GAP)),
        "frame-mark.bin": Artefact(mark, read_control, (_head(mark, Kind.MARK), True)),
    }


def _stored(stored: msgspec.Struct) -> Artefact:
    kind = type(stored)
    return Artefact(value.encode_value(stored), lambda raw: value.decode_value(raw, kind), (stored, value.Unknown()))


def _segment_artefact() -> Artefact:
    frames = [
        control.encode_state(STATE, frame_bytes_max=FRAME_MAX, **STAMP)[0],
        control.encode_gap(GAP, **STAMP),
        frame_of(FULL_ROWS, base=42, runs=(Run(2, 9, 4), Run(1, 0, 0))),
        frame_of(ONE_ROW, base=45),
        control.encode_mark(clean=True, **{**STAMP, "next_offset": 46, "durable": 46}),
    ]
    expected = (HEADER, [head_of(frame) for frame in frames])
    return Artefact(segment.encode_header(HEADER) + b"".join(frames), read_segment, expected)


def _lookups_artefact() -> Artefact:
    gathered = LookupSections(FOOTER.start)
    for batch in batches_of_rows(LOOKUP_ROWS, FOOTER.start):
        gathered.add(batch)
    entries = index.frame_entries(ENTRY_ROWS[:2])
    packed = index.encode_index(FOOTER, entries, [GAP], gathered.sections())
    expected = (
        index.decode_footer(packed),
        entries.tolist(),
        [GAP],
        [109, 154],
        [[[0, 3]], [[2]], [[4]]],
        [[[0, 3]], [[2]]],
    )
    return Artefact(packed, read_lookups, expected)


def artefacts() -> dict[str, Artefact]:
    """One small artefact of every kind, by the name of its golden file."""
    entries = index.frame_entries(ENTRY_ROWS)
    packed = index.encode_index(FOOTER, entries, [GAP])
    found_footer = index.decode_footer(packed)
    return {
        **_data_artefacts(),
        **_control_artefacts(),
        "segment.seg": _segment_artefact(),
        "segment-header.bin": Artefact(segment.encode_header(HEADER), segment.decode_header, HEADER),
        "index-lookups.idx": _lookups_artefact(),
        "deletion-vector.json": Artefact(
            vectors.encode_vector(VECTOR), vectors.decode_vector, (VECTOR, value.Unknown())
        ),
        "index.idx": Artefact(packed, read_index, (found_footer, entries.tolist(), [GAP])),
        "checkpoint": Artefact(checkpoint.encode_checkpoint(CHECKPOINT), checkpoint.decode_checkpoint, CHECKPOINT),
        "live": Artefact(live.encode_live(*LIVE), live.decode_live, LIVE),
        # Written before there were floors and deletes in it.
        "shard-state.json": _stored(SHARD_STATE)._replace(stable=False),
        "shard-state-floors.json": _stored(FLOORED_STATE),
        "descriptor.json": _stored(DESCRIPTOR),
    }
