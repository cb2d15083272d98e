"""The operations by shard name, one by one: what each does over every engine, the contracts say."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from forebay.engines import ByName

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


PAGE = (Path(__file__).parents[2] / "docs" / "by-name.md").read_text()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_operation_says_what_holds_and_the_page_lists_it(operation: str) -> None:
    assert inspect.getdoc(getattr(ByName, operation)), "what holds on return is stated"
    assert f"| `{operation}(" in PAGE


def test_there_is_no_other_operation_by_name() -> None:
    others = {"engine", "open_shard", "close"}

    assert {name for name in dir(ByName) if not name.startswith("_")} == {*OPERATIONS, *others}
    assert len(re.findall(r"^\| `\w+\(", PAGE, re.MULTILINE)) == len(OPERATIONS)
