"""A data directory written by each format version so far is opened, read and gone on with, for ever."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import forebay
from tests.golden.make import shown

VERSIONS = sorted(path for path in Path(__file__).parent.iterdir() if path.name.startswith("v"))


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
@pytest.mark.parametrize("read_only", [True, False], ids=["read-only", "owner"])
def test_a_golden_directory_gives_the_records_it_always_gave(version: Path, tmp_path: Path, *, read_only: bool) -> None:
    data = tmp_path / "data"
    shutil.copytree(version / "data", data)
    expected = json.loads((version / "records.json").read_text())

    with forebay.open(str(data), read_only=read_only) as log:
        found = {name: [shown(record) for record in log.topic(name).read()] for name in expected}

    assert found == expected


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_a_golden_directory_is_gone_on_with(version: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(version / "data", data)

    with forebay.open(str(data)) as log:
        orders = log.topic("shop/orders")
        partition = next(record.partition for record in orders.read() if record.key == b"once")
        original = next(record.offset for record in orders.read() if record.key == b"once")

        repeated = orders.append(b"once", key=b"once", producer=9, sequence=0)
        appended = orders.append(b"next", partition=partition)

        assert repeated == original
        assert appended == max(record.offset for record in orders.read(partition=partition))
        assert orders.recovery(partition).torn_bytes > 0
