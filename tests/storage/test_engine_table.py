"""The table of docs/engines.md, cell by cell: what an engine can do works, and the rest is refused with the way out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

import forebay
from forebay import Invalid, Storage, Unsupported
from forebay.testing.inside import inside
from tests.storage.rig import QUICK, values

ENGINES: Final = ("segment", "rocksdb", "memory")
_PAGE: Final = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
_CELLS: Final = {
    row[0].strip(" `"): dict(zip(ENGINES, (cell.strip() for cell in row[1:]), strict=True))
    for line in _PAGE[_PAGE.index("## What each one can do") :].split("\n\n")[2].splitlines()[2:]
    if (row := line.strip("|").split("|"))
}


def works(row: str, engine: str) -> bool:
    """What the page says of it."""
    said = _CELLS[row][engine]
    assert said.startswith(("works", "refused")), said
    return said.startswith("works")


@pytest.fixture
def log(tmp_path: Path) -> forebay.Storage:
    return Storage.open(tmp_path / "log", forebay.Settings.load(overrides=QUICK))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("durability", ["fsync", "disk", "memory", "ephemeral"])
def test_durability_classes(log: Storage, engine: str, durability: str) -> None:
    row = {"fsync": "durability `fsync`, `disk", "disk": "durability `fsync`, `disk"}.get(
        durability, f"durability `{durability}"
    )
    with log:
        if works(row, engine):
            log.create_topic("t", engine=engine, durability=durability).append(b"v")
        else:
            with pytest.raises(Invalid, match="use|needs|leave") as refused:
                log.create_topic("t", engine=engine, durability=durability)
            assert re.search(r'"(segment|rocksdb|memory|disk)"', str(refused.value)), "the way out is named"
            assert log.topics() == []


@pytest.mark.parametrize("engine", ENGINES)
def test_history_moves_and_a_second_process(tmp_path: Path, log: Storage, engine: str) -> None:
    with log:
        log.create_topic("t", engine=engine).append(b"v")
        if works("export to a store, history", engine):
            log.export_topic("t")
        else:
            with pytest.raises(Unsupported, match='engine "segment".*copy the records'):
                log.export_topic("t")
        with forebay.open(tmp_path / "log", QUICK, read_only=True) as beside:
            if works("a second process reads along", engine):
                assert values(beside.topic("t").read()) == [b"v"]
            else:
                with pytest.raises(Unsupported, match="owner|owns the directory"):
                    beside.topic("t")
        if works("seal, move to another directory", engine):
            assert log.seal_topic("t")[0].next_offset == 1
        else:
            with pytest.raises(Unsupported, match='engine "segment".*copy the records'):
                log.seal_topic("t")
            assert values(log.topic("t").read()) == [b"v"]


@pytest.mark.parametrize("engine", ENGINES)
def test_look_ups_deletes_and_limits(log: Storage, engine: str) -> None:
    assert all(works(row, engine) for row in ("look-ups by key, tag, time", "deletes", "caps, time to live"))
    with log:
        topic = log.create_topic("t", engine=engine, cap_records=2)
        for number in range(4):
            topic.append(b"%d" % number, key=b"k", tag="a", timestamp=number)
        assert values(topic.read_by_key(b"k")) == [b"3"] and topic.offset_at_time(2) == 2
        inside(log).workers.limits.step()
        assert values(topic.read_by_tag("a")) == [b"2", b"3"]
        assert topic.delete_by_offset(2, 3) == 1 and values(topic.read()) == [b"3"]


def test_the_page_speaks_of_every_cell() -> None:
    assert len(_CELLS) >= 12
    assert all(cell for row in _CELLS.values() for cell in row.values())
