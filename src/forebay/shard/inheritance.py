"""What a new owner takes over from the last one beside the offsets: which appends it must recognise as repeats."""

from __future__ import annotations

import contextlib

from forebay.catalog import ShardCatalog
from forebay.format.control import decode_state
from forebay.format.descriptor import DescriptorKind
from forebay.format.frame import Kind
from forebay.format.segment import HEADER_BYTES
from forebay.sealed import salt_crc_of
from forebay.settings import WalSettings
from forebay.shard.places import Places
from forebay.wal.scan import note_producers, note_state, pieces_of
from forebay.wal.window import ProducerWindow


def inherited_window(catalog: ShardCatalog, places: Places, settings: WalSettings) -> ProducerWindow:
    """The window as of the end of history: the newest segment born in the log restates what came before it."""
    window = ProducerWindow(settings.producers_max, settings.producer_appends_max)
    if catalog.frontier().next == 0:
        return window
    newest = next((piece for piece in reversed(catalog.descriptors()) if piece.is_born), None)
    if newest is None or not newest.producers:
        return window
    if newest.kind is DescriptorKind.PARQUET:
        from forebay.columnar import ParquetSegment  # noqa: PLC0415 - it brings Arrow, which takes its time to load

        with contextlib.closing(places.segment(newest)) as segment:
            assert isinstance(segment, ParquetSegment)
            window.extend(segment.window())
        return window
    with contextlib.closing(places.source(newest)) as source:
        salt_crc = salt_crc_of(source, newest.object_key)
        for piece in pieces_of(source, salt_crc, HEADER_BYTES, newest.bytes):
            for head, position in zip(piece.heads, piece.positions, strict=True):
                if head.kind == Kind.DATA:
                    note_producers(window, head, piece.buffer, position)
                elif head.kind == Kind.STATE:
                    note_state(window, decode_state(piece.buffer, position, head))
    return window
