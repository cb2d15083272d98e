"""What a worker of Spark loads before its first row: each process of a query pays for it once."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import forebay
from forebay.spark.source import ForebayDataSource
from tests.spark.topics import SETTINGS
from tests.support.brokers import running_broker

MODULES_MAX: Final = 119
MODULES_MAX_BY_BROKER: Final = 108
_TASK: Final = """
import pickle, sys
reader, partitions = pickle.load(sys.stdin.buffer)
print(sum(batch.num_rows for partition in partitions for batch in reader.read(partition)))
print(*sys.modules)
"""
"""What a worker does: it unpickles the reader and its part of the plan, and reads."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with forebay.open(str(tmp_path / "data"), SETTINGS) as log:
        log.create_topic("shop/orders", partitions=2).append_many([b"1", b"2", b"3"], keys=[b"1", None, b"3"])
    return tmp_path / "data"


def _loaded_by_a_task(**options: str) -> tuple[str, list[str]]:
    """The rows that it has read, and the modules that it has loaded."""
    source = ForebayDataSource({**options, "topic": "shop/orders"})
    reader = source.reader(source.schema())
    task = pickle.dumps((reader, reader.partitions()))
    reported = subprocess.run([sys.executable, "-c", _TASK], input=task, capture_output=True, check=True)
    rows, modules = reported.stdout.decode().splitlines()
    return rows, modules.split()


@pytest.mark.slow
def test_a_task_by_broker_opens_no_directory_and_no_metadata(data: Path) -> None:
    with running_broker(data) as broker:
        rows, loaded = _loaded_by_a_task(broker=broker.url)

    own = {name for name in loaded if name.partition(".")[0] == "forebay"}
    assert rows == "3"
    assert "httpx" in loaded
    assert not own & {"forebay.spark.place.opening", "forebay.definitions", "forebay.places", "forebay.wal.readonly"}
    assert not {name.split(".")[1] for name in own - {"forebay"}} & {"catalog", "metadata", "surface"}
    assert not {"pandas", "pyiceberg", "yaml"} & set(loaded)
    assert len(own) <= MODULES_MAX_BY_BROKER, sorted(own)


@pytest.mark.slow
def test_a_task_loads_what_it_reads_with_and_no_more(data: Path) -> None:
    rows, loaded = _loaded_by_a_task(path=str(data))

    own = {name for name in loaded if name.partition(".")[0] == "forebay"}
    rooms = {name.split(".")[1] for name in own - {"forebay"}}
    assert rows == "3"
    assert "httpx" not in loaded
    assert not rooms & {"cleanup", "engines", "export", "inspection", "loads", "shard", "storage"}
    assert not {"pandas", "pyarrow.parquet", "pyiceberg", "matplotlib", "yaml"} & set(loaded)
    assert len(own) <= MODULES_MAX, sorted(own)
