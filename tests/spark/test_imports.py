"""What a worker of Spark loads before its first row: each process of a query pays for it once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import forebay
from tests.spark.topics import SETTINGS

_READ = """
import sys
from forebay.spark.reading.options import ReadOptions
from forebay.spark.reading.task import read_split
from forebay.spark.reading.view import load
from forebay.spark.reading.plan import plan
options = ReadOptions.parse({"path": sys.argv[1], "topic": "shop/orders"})
splits = plan(*load(options), columns=options.columns)
print(sum(batch.num_rows for split in splits for batch in read_split(split)))
print(sorted({"pandas", "pyiceberg", "matplotlib"} & set(sys.modules)))
"""


def test_reading_does_not_load_what_it_does_not_use(tmp_path: Path) -> None:
    with forebay.open(str(tmp_path / "data"), SETTINGS) as log:
        log.create_topic("shop/orders", partitions=2).append_many([b"1", b"2", b"3"], keys=[b"1", None, b"3"])

    command = [sys.executable, "-c", _READ, str(tmp_path / "data")]
    reported = subprocess.run(command, capture_output=True, text=True, check=True)

    assert reported.stdout.splitlines() == ["3", "[]"]
