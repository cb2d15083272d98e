"""The window of idempotent producers, kept in the database: each append beside the records it brought."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from forebay.appends.producer_window import ProducerWindow
from forebay.appends.queue import PendingFrame
from forebay.engines.rocksdb.database import View
from forebay.engines.rocksdb.layout import Keys, appended_in, decode_appended, encode_appended
from forebay.engines.rocksdb.times import Changes
from forebay.format.control.frames import WindowEntry
from forebay.settings import WalSettings

SEQUENCE_MAX = 2**64 - 1


def put_runs(
    changes: Changes, keys: Keys, frames: Sequence[PendingFrame], window: ProducerWindow, settings: WalSettings
) -> None:
    """Write down who appended what in these frames, and forget what the window is about to forget."""
    new: set[int] = set()
    for frame in frames:
        offset = frame.base
        for run in frame.runs():
            if run.producer:
                changes.put(keys.appended(run.producer, run.sequence), encode_appended(run.count, offset))
                if run.sequence >= settings.producer_appends_max:
                    changes.delete(keys.appended(run.producer, run.sequence - settings.producer_appends_max))
                new.add(run.producer)
            offset += run.count
    unknown = sum(window.last_sequence(producer) is None for producer in new)
    excess = window.producers + unknown - settings.producers_max
    if unknown and excess > 0:
        silent = (producer for producer, _ in groupby(window.entries(), attrgetter("producer")) if producer not in new)
        for producer, _ in zip(silent, range(excess), strict=False):
            forget(changes, keys, producer)


def forget(changes: Changes, keys: Keys, producer: int) -> None:
    """Remove everything of one producer."""
    changes.delete_range(keys.appended(producer, 0), keys.appended(producer, SEQUENCE_MAX))


def stored_window(view: View, keys: Keys, settings: WalSettings) -> ProducerWindow:
    """The window as the last owner left it: the longest silent producer is the one whose last append is oldest."""
    found: dict[int, list[WindowEntry]] = {}
    for key, value in view.rows(*keys.window):
        producer, sequence = appended_in(key)
        count, offset = decode_appended(value)
        found.setdefault(producer, []).append(WindowEntry(producer, sequence, 1, count, offset))
    window = ProducerWindow(settings.producers_max, settings.producer_appends_max)
    for entries in sorted(found.values(), key=lambda entries: entries[-1].offset):
        window.extend(entries)
    return window
