"""Which appends must the owner of a shard recognise as repeats, and are all of them known?

A new owner reads them from the newest segment of history, the same owner from its newest log file. Where either is
damaged, appends may be missing: the window is partial then, and refuses producers that it does not know. The shard's
state remembers that, because the next log file restates the window without saying so.
"""

from __future__ import annotations

import contextlib
import logging
from typing import NamedTuple

from forebay.appends.producer_window import ProducerWindow
from forebay.catalog import ShardCatalog
from forebay.errors import Corrupt
from forebay.format.control import decode_state
from forebay.format.descriptor import DescriptorKind, SegmentDescriptor
from forebay.format.frame import Kind
from forebay.format.segment import HEADER_BYTES
from forebay.history import REPLACED
from forebay.records import Reason
from forebay.sealed import ByteSource, salt_crc_of
from forebay.settings import WalSettings
from forebay.shard.places import Places
from forebay.wal.recovery.survey import Survey
from forebay.wal.scan import note_producers, note_state
from forebay.wal.sealing import Opening
from forebay.wal.walk import ControlFrame, DataFrames, Unreadable, walk

logger = logging.getLogger(__name__)


class KnownProducers(NamedTuple):
    """The appends that are recognised as repeats; below `unknown_below` there may have been others."""

    window: ProducerWindow
    unknown_below: int


def known_in_log(facts: Survey, unknown_below: int) -> KnownProducers:
    """By the owner's newest log file. `unknown_below` is what the shard's state says."""
    window, last = facts.window, facts.last
    if window.is_partial:
        return KnownProducers(window, max(unknown_below, facts.end))
    # A file that began before the damage was found restated all that came before it, and is whole now.
    window.is_partial = last is not None and last.start >= unknown_below > 0
    return KnownProducers(window, unknown_below if window.is_partial else 0)


def known_in_history(
    catalog: ShardCatalog, places: Places, settings: WalSettings, unknown_below: int
) -> KnownProducers:
    """By history, where no local log tells: the newest segment born in the log restates what came before it."""
    window = ProducerWindow(settings.producers_max, settings.producer_appends_max)
    frontier = catalog.frontier().next
    if frontier == 0:
        return KnownProducers(window, 0)
    pieces = catalog.descriptors()
    newest = next((piece for piece in reversed(pieces) if piece.is_born), None)
    if newest is not None and newest.producers:
        try:
            _take(window, newest, places)
        except (Corrupt, *REPLACED) as error:
            window.lose()
            logger.warning("%s: which producers have appended what cannot be told: %s", catalog.keys, error)
    end = newest.end if newest is not None else 0
    if any(piece.start >= end and _is_damaged(piece) for piece in pieces):
        window.lose()
    if window.is_partial:
        return KnownProducers(window, frontier)
    # What was exported since the damage was found has been restated from a partial window.
    window.is_partial = end > unknown_below > 0
    return KnownProducers(window, unknown_below if window.is_partial else 0)


def _is_damaged(piece: SegmentDescriptor) -> bool:
    return piece.gap is not None and piece.gap.reason is Reason.DAMAGED


def _take(window: ProducerWindow, newest: SegmentDescriptor, places: Places) -> None:
    """Add what the segment tells; `Corrupt` if not all of it is whole."""
    if newest.kind is DescriptorKind.PARQUET:
        from forebay.columnar import ParquetSegment  # noqa: PLC0415 - it brings Arrow, which takes its time to load

        with contextlib.closing(places.segment(newest)) as segment:
            assert isinstance(segment, ParquetSegment)
            window.extend(segment.window())
        return
    with contextlib.closing(places.source(newest)) as source:
        _walk(window, newest, source)


def _walk(window: ProducerWindow, newest: SegmentDescriptor, source: ByteSource) -> None:
    salt_crc, opening = salt_crc_of(source, newest.object_key), Opening()
    for step in walk(source, salt_crc, HEADER_BYTES, newest.bytes, expected=0, end=0):
        match step:
            case DataFrames():
                for head, position in step.each():
                    note_producers(window, head, step.buffer, position)
            case ControlFrame():
                if step.head.kind == Kind.STATE:
                    state = decode_state(step.buffer, step.position, step.head)
                    opening.take(state)
                    note_state(window, state)
            case Unreadable():
                raise Corrupt(f'{newest.object_key} is damaged at byte {step.byte}: run "forebay repair"')
    if not opening.is_whole:
        raise Corrupt(f'{newest.object_key} has no whole state frame at its start: run "forebay repair"')
