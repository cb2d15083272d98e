"""What must hold inside the database of the RocksDB engine after any kill; `forebay verify` must agree."""

from __future__ import annotations

from forebay.disk import SystemDisk
from forebay.engines.rocksdb.auditing import ShardAudit
from forebay.engines.rocksdb.database import RocksDatabase, View
from forebay.engines.rocksdb.layout import (
    EntryKind,
    Keys,
    ShardCounters,
    StoredEntry,
    appended_in,
    decode_appended,
    decode_entry,
    decode_time,
    offset_in,
)
from forebay.engines.rocksdb.rows import index_keys
from forebay.topics import ShardRef


def violations(path: str, ref: ShardRef) -> list[str]:
    """What is wrong with one shard of the database, which no caller has open."""
    database = RocksDatabase(path, SystemDisk())
    keys = Keys(ref.spec.topic_id, ref.partition)
    try:
        stored = database.get(keys.counters)
        if stored is None:
            return []
        with database.view() as view:
            counters = ShardCounters.decode(stored)
            entries = [decode_entry(offset_in(key), value) for key, value in view.rows(*keys.entries)]
            return [
                *_of_entries(entries, counters, keys),
                *_of_lookups(view, entries, keys),
                *_of_times(view, entries, counters, keys),
                *_of_producers(view, counters, keys),
                *_as_verified(database, keys),
            ]
    finally:
        database.close()


def _as_verified(database: RocksDatabase, keys: Keys) -> list[str]:
    audit = ShardAudit(database, keys, lambda count: None)
    audit.run()
    return [f"verify: {flaw.what}" for flaw in audit.flaws]


def _of_entries(entries: list[StoredEntry], counters: ShardCounters, keys: Keys) -> list[str]:
    """Entries cover [earliest, next) without a gap and count what they say."""
    found = []
    at, before = counters.earliest, counters.below
    for entry in entries:
        if (entry.base, entry.before) != (at, before):
            found.append(f"entry {entry.base} (before: {entry.before}), expected {at} ({before})")
        at, before = entry.end, entry.before + int(entry.sizes(keys.salt_crc).sum())
    if (at, before) != (counters.next, counters.total):
        found.append(f"entries end at {at} ({before}), counters say {counters.next} ({counters.total})")
    live = sum(entry.end - entry.base for entry in entries if entry.kind is EntryKind.LIVE)
    if live != counters.live:
        found.append(f"{live} records are live, counters say {counters.live}")
    if counters.evict_floor > counters.earliest:
        found.append(f"evict_floor {counters.evict_floor} above earliest {counters.earliest}")
    return found


def _of_lookups(view: View, entries: list[StoredEntry], keys: Keys) -> list[str]:
    """No index entry without its record, and no record without its index entries."""
    expected = {
        key for entry in entries if entry.kind is EntryKind.LIVE for key in index_keys(keys, entry.batch(keys.salt_crc))
    }
    stored = {
        key
        for letter in b"kt"
        for key, _ in view.rows(keys.start + bytes((letter,)), keys.start + bytes((letter + 1,)))
    }
    return [f"an index entry without its record: {key!r}" for key in stored - expected] + [
        f"a record without its index entry: {key!r}" for key in expected - stored
    ]


def _of_times(view: View, entries: list[StoredEntry], counters: ShardCounters, keys: Keys) -> list[str]:
    """Each full block has the newest time of its live records; one that `earliest` cuts may have a newer one."""
    times: dict[int, int] = {}
    for entry in entries:
        if entry.kind is EntryKind.LIVE:
            batch = entry.batch(keys.salt_crc)
            times.update(zip(range(batch.base, batch.end), batch.timestamps().tolist(), strict=True))
    stored = {(key[-9], offset_in(key)): decode_time(value) for key, value in view.rows(*keys.blocks)}
    expected: dict[tuple[int, int], int] = {}
    for offset, time in times.items():
        for level in range(4):
            number = offset >> 6 * (level + 1)
            if (number + 1) << 6 * (level + 1) <= counters.next:
                expected[level, number] = max(time, expected.get((level, number), time))
    cut = {(level, counters.earliest >> 6 * (level + 1)) for level in range(4)}
    found = [f"no newest time of block {place}" for place in expected.keys() - stored.keys()]
    for place, time in stored.items():
        if place not in cut and time != expected.get(place):
            found.append(f"block {place} says {time}, expected {expected.get(place)}")
        if place in cut and time < expected.get(place, time):
            found.append(f"block {place} says {time}, too old for {expected[place]}")
    return found


def _of_producers(view: View, counters: ShardCounters, keys: Keys) -> list[str]:
    """No producer is remembered for records that are not there."""
    found = []
    for key, value in view.rows(*keys.window):
        count, offset = decode_appended(value)
        if offset + count > counters.next:
            found.append(f"producer {appended_in(key)} appended up to {offset + count}, above {counters.next}")
    return found
