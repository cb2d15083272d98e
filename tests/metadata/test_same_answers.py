"""The same calls on memory and on SQLite: the same answers, whatever the calls."""

from __future__ import annotations

import tempfile
from contextlib import closing

from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.errors import ForebayError
from forebay.metadata import (
    Absent,
    Compare,
    Delete,
    DeleteRange,
    Exists,
    MemoryMetadata,
    MetadataStore,
    Operation,
    Outcome,
    Put,
    RevisionIs,
    SqliteMetadata,
    ValueIs,
)

KEYS = st.sampled_from(["a", "a/", "a/1", "a/2", "a0", "a%", "b", "é"])
PREFIXES = st.sampled_from(["", "a", "a/", "a%", "b", "é", "c"])
VALUES = st.sampled_from([b"", b"x", b"y"])
COMPARES = st.one_of(
    st.builds(Absent, KEYS),
    st.builds(Exists, KEYS),
    st.builds(RevisionIs, KEYS, st.integers(0, 12)),
    st.builds(ValueIs, KEYS, VALUES),
)
OPERATIONS = st.one_of(
    st.builds(Put, KEYS, VALUES), st.builds(Delete, KEYS), st.builds(Delete, KEYS), st.builds(DeleteRange, PREFIXES)
)
TRANSACTIONS = st.tuples(st.lists(COMPARES, max_size=1), st.lists(OPERATIONS, max_size=4))


def answer(store: MetadataStore, compares: list[Compare], operations: list[Operation]) -> Outcome | str:
    try:
        return store.transaction(compares, operations)
    except ForebayError as error:
        return repr(error)


@settings(max_examples=60)
@given(st.lists(TRANSACTIONS, min_size=3, max_size=12), PREFIXES, KEYS)
def test_memory_and_sqlite_agree(
    transactions: list[tuple[list[Compare], list[Operation]]], prefix: str, after: str
) -> None:
    memory = MemoryMetadata()
    with (
        tempfile.TemporaryDirectory() as directory,
        closing(SqliteMetadata(f"{directory}/m", disk=SystemDisk(), clock=SystemClock())) as sqlite,
        memory.watch(prefix) as memory_watch,
        sqlite.watch(prefix) as sqlite_watch,
    ):
        for compares, operations in transactions:
            assert answer(memory, compares, operations) == answer(sqlite, compares, operations)

        assert memory.range("") == sqlite.range("")
        assert memory.range(prefix, start_after=after, limit=2) == sqlite.range(prefix, start_after=after, limit=2)
        assert memory.get(after) == sqlite.get(after)
        assert memory_watch.poll(0.0) == sqlite_watch.poll(0.0)
        assert memory_watch.revision == sqlite_watch.revision == memory.revision() == sqlite.revision()
