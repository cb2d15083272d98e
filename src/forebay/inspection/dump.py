"""What stands in a file of a data directory, item by item, as plain values. Knows every format; changes nothing.

An item is a mapping whose `kind` says what it is. Bytes that are text are given as text, others in base64
under a name that ends in `_b64`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import msgspec

from forebay.decoders import decoder
from forebay.directory import MARKER
from forebay.disk import Disk, File
from forebay.errors import Corrupt, Invalid, UnsupportedFormat
from forebay.format.checksum import salted
from forebay.format.columns.rows import Column
from forebay.format.control.frames import decode_delete, decode_floor, decode_gap, decode_mark, decode_state, reason_of
from forebay.format.files.checkpoint import Checkpoint, decode_checkpoint
from forebay.format.files.live import Live, decode_live
from forebay.format.files.segment import (
    HEADER_BYTES,
    INDEX_SUFFIX,
    PARQUET_SUFFIX,
    SEGMENT_SUFFIX,
    SegmentHeader,
    decode_header,
)
from forebay.format.frame.batch import decode
from forebay.format.frame.encoding import runs_of
from forebay.format.frame.head import Codec, FrameHead, Kind, Verdict
from forebay.format.index import sections as index_format
from forebay.format.metadata.descriptor import Cur, SegmentDescriptor, ShardState
from forebay.format.metadata.value import decode_value
from forebay.metadata import Entry
from forebay.records import OFFSET_MAX, Gap, Record
from forebay.wal.recovery.survey import CHECKPOINT_NAME
from forebay.wal.tail import LIVE_NAME
from forebay.wal.walk import ControlFrame, DataFrames, Unreadable, walk
from forebay.wire.items import RecordItem, plain_item, written

Item: TypeAlias = dict[str, Any]

SMALL_FILE_BYTES = 16 * 1024 * 1024


def dump(disk: Disk, path: str, *, records: bool = False) -> Iterator[Item]:
    """The items of one file, known by its name. With `records`, each record of a segment too."""
    name = path.rpartition("/")[2]
    kinds: dict[str, Callable[[bytes], Iterator[Item]]] = {
        CHECKPOINT_NAME: _checkpoint,
        LIVE_NAME: _live,
        MARKER: _marker,
    }
    if name.endswith(SEGMENT_SUFFIX):
        return _segment(disk, path, records=records)
    if name.endswith(PARQUET_SUFFIX):
        return _columns(disk, path, records=records)
    if name.endswith(INDEX_SUFFIX):
        return _index(_content(disk, path, None))
    # What was set aside keeps its name in front: checkpoint.1
    reader = kinds.get(name) or kinds.get(name.partition(".")[0])
    if reader is None:
        known = f"*{SEGMENT_SUFFIX}, *{PARQUET_SUFFIX}, *{INDEX_SUFFIX}, {', '.join(sorted(kinds))}"
        raise Invalid(f"{path} is no file that Forebay writes; known: {known} and the metadata store")
    return reader(_content(disk, path, SMALL_FILE_BYTES))


def dump_metadata(entries: list[Entry]) -> Iterator[Item]:
    """Each key of the metadata store with what its value says."""
    for entry in entries:
        item: Item = {
            "kind": "metadata",
            "key": entry.key,
            "created": entry.create_revision,
            "changed": entry.mod_revision,
        }
        if entry.session is not None:
            item["session"] = entry.session
        try:
            item["value"] = msgspec.json.decode(entry.value)
        except msgspec.MsgspecError:
            text, coded = written(entry.value)
            item |= msgspec.to_builtins(RecordItem(value=text, value_b64=coded))
        yield item


def dump_catalog(shard: str, entries: list[Entry]) -> Iterator[Item]:
    """The recorded state of one shard, the end of its history and each piece of it; `entries` are all it has."""
    kinds: dict[str, tuple[str, type[msgspec.Struct]]] = {"state": ("state", ShardState), "cur": ("cur", Cur)}
    for entry in sorted(entries, key=lambda entry: (not entry.key.endswith("/state"), entry.key)):
        kind, of = kinds.get(entry.key.rpartition("/")[2], ("piece", SegmentDescriptor))
        if kind == "piece" and "/segments/" not in entry.key:
            continue
        item: Item = {"kind": kind, "shard": shard, "changed": entry.mod_revision}
        try:
            fields = msgspec.to_builtins(decode_value(entry.value, of)[0])
        except (Corrupt, UnsupportedFormat) as error:
            yield {**item, "kind": "not whole", "key": entry.key, "error": str(error)}
            continue
        if kind == "piece":
            item["kind"] = fields.pop("kind")
            fields |= {"reason": reason_of(fields["reason"]).name.lower()} if fields.get("reason") else {}
        yield item | fields


def _content(disk: Disk, path: str, bytes_max: int | None) -> bytes:
    with contextlib.closing(_opened(disk, path)) as file:
        size = file.size()
        if bytes_max is not None and size > bytes_max:
            raise Invalid(f"{path} has {size} bytes, more than such a file ever has")
        return file.read_at(size, 0)


def _opened(disk: Disk, path: str) -> File:
    try:
        return disk.open(path)
    except OSError as error:
        raise Invalid(f"{path} cannot be read: {error.strerror or error}") from error


def _segment(disk: Disk, path: str, *, records: bool) -> Iterator[Item]:
    with contextlib.closing(_opened(disk, path)) as file:
        size = file.size()
        header = decode_header(file.read_at(HEADER_BYTES, 0))
        if isinstance(header, Verdict):
            yield {"kind": "segment", "verdict": header.value, "bytes": size}
            return
        yield {"kind": "segment", **_plain(header), "salt": header.salt.hex(), "bytes": size}
        yield from _frames(file, header, size, records=records)


def _frames(file: File, header: SegmentHeader, size: int, *, records: bool) -> Iterator[Item]:
    salt_crc = salted(header.salt)
    for step in walk(file, salt_crc, HEADER_BYTES, size, expected=header.start, end=OFFSET_MAX):
        match step:
            case DataFrames():
                for head, place in step.each():
                    yield from _frame(header, step, head, place, records=records)
            case ControlFrame():
                yield from _frame(header, step, step.head, step.position, records=records)
            case Unreadable():
                item: Item = {"kind": "not whole", "byte": step.byte, "verdict": step.verdict.value}
                item |= {"bytes": step.stop - step.byte}
                yield item | ({"resumes_at_offset": step.gap.stop} if step.is_followed else {})


def _frame(
    header: SegmentHeader, step: DataFrames | ControlFrame, head: FrameHead, place: int, *, records: bool
) -> Iterator[Item]:
    known = head.kind in set(Kind)
    item: Item = {
        "kind": Kind(head.kind).name.lower() if known else f"kind {head.kind}",
        "byte": step.origin + place,
        "bytes": head.length,
        "offset": head.base,
        "epoch": head.epoch,
        "durable": head.durable,
        "appended_at": head.appended_at,
    }
    batch = None
    try:
        if head.kind == Kind.DATA:
            columns = [str(column.name).lower() for column in Column(head.columns)]
            item |= {"end": head.end, "records": head.count, "codec": Codec(head.codec).name.lower()}
            item |= {"columns": columns} if columns else {}
            if head.run_count:
                item["runs"] = [run._asdict() for run in runs_of(step.buffer, place, head)]
            batch = decode(step.buffer, place, head) if records else None
        elif head.kind == Kind.STATE:
            item |= _plain(decode_state(step.buffer, place, head))
            item["window"] = [list(entry) for entry in item["window"]]
        elif head.kind == Kind.GAP:
            item["gap"] = _gap(decode_gap(step.buffer, place, head))
        elif head.kind == Kind.MARK:
            item["clean"] = decode_mark(step.buffer, place, head)
        elif head.kind == Kind.DELETE:
            windows = list(decode_delete(step.buffer, place, head).windows())
            item["deletes"] = sum(len(bitmap) for _, bitmap in windows)
            item |= {"first": windows[0][0] + windows[0][1].min(), "last": windows[-1][0] + windows[-1][1].max()}
        elif head.kind == Kind.FLOOR:
            floor = decode_floor(step.buffer, place, head)
            item |= {"earliest": floor.earliest, "evict_floor": floor.evict_floor}
            item |= {"reason": floor.reason.name.lower()} if floor.reason is not None else {}
    except Corrupt as error:
        item["error"] = str(error)
    yield item
    for record in batch.records(header.partition) if batch is not None else ():
        yield {"kind": "record", **plain_item(record)}


def _gap(gap: Gap) -> Item:
    return {"start": gap.start, "stop": gap.stop, "reason": gap.reason.name.lower()}


def _columns(disk: Disk, path: str, *, records: bool) -> Iterator[Item]:
    from forebay.inspection.history.parquet import dump_columns  # noqa: PLC0415 - it brings Arrow

    with contextlib.closing(disk.open(path)) as file:
        try:
            for item in dump_columns(file.read_at, file.size(), path, records=records):
                yield {"kind": "record", **plain_item(item)} if isinstance(item, Record) else item
        except Corrupt as error:
            yield {"kind": "not whole", "error": str(error)}


def _index(content: bytes) -> Iterator[Item]:
    footer = index_format.decode_footer(content)
    if isinstance(footer, Verdict):
        yield {"kind": "index", "verdict": footer.value, "bytes": len(content)}
        return
    yield {"kind": "index", **_plain(footer), "content_hash": footer.content_hash.hex()}
    try:
        decoded = index_format.decode_index(content)
    except Corrupt as error:
        yield {"kind": "not whole", "error": str(error)}
        return
    assert not isinstance(decoded, Verdict)
    names = decoded[1].dtype.names or ()
    for entry in decoded[1]:
        yield {"kind": "entry", **{name: int(entry[name]) for name in names}}
    for gap in decoded[2]:
        yield {"kind": "gap", **_gap(gap)}


def _checkpoint(content: bytes) -> Iterator[Item]:
    checkpoint = decode_checkpoint(content)
    if not isinstance(checkpoint, Checkpoint):
        yield {"kind": "checkpoint", "verdict": checkpoint.value, "bytes": len(content)}
        return
    item = _plain(checkpoint)
    files = item.pop("files")
    yield {"kind": "checkpoint", **item}
    for file in files:
        yield {"kind": "file", "start": file.start, "epoch": file.epoch, "end": file.end}


def _live(content: bytes) -> Iterator[Item]:
    live = decode_live(content)
    if isinstance(live, Live):
        yield {"kind": "live", **live._asdict()}
    else:
        yield {"kind": "live", "verdict": live.value, "bytes": len(content)}


def _marker(content: bytes) -> Iterator[Item]:
    try:
        yield {"kind": "directory", **decoder(dict[str, Any]).decode(content)}
    except msgspec.MsgspecError as error:
        yield {"kind": "directory", "verdict": Verdict.DAMAGED.value, "error": str(error)}


def _plain(value: msgspec.Struct) -> Item:
    return msgspec.structs.asdict(value)
