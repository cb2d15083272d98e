"""Samples of bulk loads, and their golden files: `python -m tests.history.loads` writes those that are not there yet.

A file that exists is never written again: what a release stored must stay readable.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from forebay.format.columns.rows import Row, encode_rows
from forebay.format.files.segment import SegmentHeader
from forebay.format.metadata.descriptor import gap_descriptor
from forebay.format.metadata.value import encode_value
from forebay.inspection.segments import without_lookups
from forebay.loads.book import SinkState
from forebay.loads.prepare import (
    LoadPlace,
    Prepared,
    PreparedSegment,
    Sink,
    descriptors_of,
    manifest_of,
    offer_of,
    write_manifest,
    write_segment,
)
from forebay.manifests import CatalogManifest, store_value
from forebay.pages import Page
from forebay.records import Gap, Reason, Record
from forebay.sealed import StoredSegment
from forebay.testing.simulated.blobs import SimulatedBlobs
from forebay.testing.simulated.clock import ManualClock
from tests.format.samples import FULL_ROWS, ONE_ROW, SALT

GOLDEN: Final = Path(__file__).parent / "golden" / "v1"
TOPIC: Final = "ab" * 16
PLACE: Final = LoadPlace("load-7", TOPIC, 0)
HEADER: Final = SegmentHeader(TOPIC, 0, 0, 0, 1_700_000_000_000, SALT)


class Memory:
    """A `ByteSource` over bytes that are here."""

    def __init__(self, content: bytes) -> None:
        self._file = io.BytesIO(content)

    def read_at(self, length: int, position: int) -> bytes:
        self._file.seek(position)
        return self._file.read(length)

    def size(self) -> int:
        return len(self._file.getbuffer())

    def close(self) -> None:
        """Nothing to give back."""


def prepared_bytes(batches: Iterable[Sequence[Row]]) -> tuple[bytes, bytes]:
    """The segment and the index of these rows."""
    segment = PreparedSegment(HEADER)
    content = b"".join(segment.chunks(encode_rows(rows) for rows in batches))
    return content, segment.index()[0]


def opened(content: bytes, index: bytes, start: int, records: int) -> StoredSegment:
    """The segment, put at `start`."""
    return StoredSegment(
        "a.seg", start, start + records, source=lambda: Memory(content), index=lambda: Memory(index), shift=start
    )


def walked(segment: StoredSegment, offset: int, page_bytes: int = 1) -> tuple[list[Record], list[Gap]]:
    """All records and gaps from `offset` on."""
    records: list[Record] = []
    gaps: list[Gap] = []
    while offset < segment.end:
        page: Page = segment.read(offset, page_bytes)
        records += [record for batch in page.batches for record in batch.records(0)]
        gaps += page.events
        offset = page.next
    return records, gaps


def expected(rows: Iterable[Row], start: int) -> list[Record]:
    """The records that these rows become behind `start`."""
    return [
        Record(0, start + place, time, key, value, tag, headers)
        for place, (value, key, tag, headers, time) in enumerate(rows)
    ]


def _old_segment(store: SimulatedBlobs) -> Prepared:
    """A segment of a load whose index has no look-ups."""
    segment = write_segment(store, PLACE, "3-0", [encode_rows(FULL_ROWS)], clock=ManualClock(seed=1))
    assert segment is not None
    index = without_lookups(store.contents[segment.index_key])
    store.upload(segment.index_key, [index])
    return msgspec.structs.replace(segment, index_bytes=len(index))


def artefacts() -> dict[str, bytes]:
    """One small artefact of every kind, by the name of its golden file."""
    content, index = prepared_bytes([FULL_ROWS, ONE_ROW])
    store = SimulatedBlobs()
    segment = _old_segment(store)
    manifest = manifest_of(PLACE.load_id, TOPIC, [(0, segment), (2, segment)])
    ref = write_manifest(store, manifest)
    load = offer_of(manifest, ref, namespace="shop", topic="orders", store="store", created_at=5)
    sink, directory = Sink(query_id="8c2e", batch_id=3), "cd" * 16
    batch = msgspec.structs.replace(load, sink=sink, directory=directory, expires_at=9)
    reached = SinkState(topic_id=TOPIC, batch_id=2, load_id="load-6", offered=PLACE.load_id)
    placed = descriptors_of(manifest, 0, 42, epoch=3, store="store", leader="me", created_at=6)
    gap = gap_descriptor(Gap(45, 50, Reason.SKIPPED), topic_id=TOPIC, epoch=3, created_at=7)
    listed = store_value(store, "", CatalogManifest((*placed, gap)))
    return {
        "prepared.seg": content,
        "prepared.idx": without_lookups(index),
        "prepared-lookups.idx": index,
        "load.manifest": store.contents[ref.object_key],
        "load.json": encode_value(load),
        "load-batch.json": encode_value(batch),
        "sink.json": encode_value(reached),
        "catalog.manifest": store.contents[listed.object_key],
    }


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, artefact in artefacts().items():
        if not (GOLDEN / name).exists():
            (GOLDEN / name).write_bytes(artefact)
