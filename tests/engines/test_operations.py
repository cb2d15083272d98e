"""The table of operations that every engine offers, cell by cell: what each does, the contracts say."""

from __future__ import annotations

import inspect

import pytest

from forebay.engines import MemoryEngine, RocksEngine, SegmentEngine
from forebay.engines.seam import LookedUpEngine

OPERATIONS = [
    "create_shard",
    "delete_shard",
    "list_shard",
    "write",
    "batch_write",
    "read_by_offset",
    "read_by_tag",
    "read_by_key",
    "delete_by_key",
    "delete_by_offset",
    "delete_by_tag",
    "delete_before",
    "get_offset_by_timestamp",
    "get_offset_by_group",
    "commit_offset",
]


@pytest.mark.parametrize("engine", [MemoryEngine, RocksEngine, SegmentEngine])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_engine_offers_the_operation_as_the_interface_states_it(operation: str, engine: type) -> None:
    stated, offered = getattr(LookedUpEngine, operation), getattr(engine, operation)

    assert inspect.signature(offered) == inspect.signature(stated)
    assert inspect.getdoc(stated), "what holds on return is stated"


def test_the_interface_has_no_other_operation() -> None:
    life = {"prepare", "open_shard", "close", "abandon"}

    assert {name for name in dir(LookedUpEngine) if not name.startswith("_")} == {*OPERATIONS, *life}
