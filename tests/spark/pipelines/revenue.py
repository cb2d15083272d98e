"""The example of revenue as shipped, and what a plain computation says its result is."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import forebay
from examples.fill import append_orders, fill, orders
from tests.spark.pipelines.files import records_of
from tests.spark.topics import SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Revenue: TypeAlias = dict[tuple[datetime, str], tuple[int, Decimal]]

EXAMPLES: Final = Path(__file__).parents[3] / "examples"
_MINUTE: Final = timedelta(minutes=1)


def shipped(directory: Path) -> Path:
    """A copy of the examples, with their topics filled."""
    home = directory / "examples"
    shutil.copytree(EXAMPLES, home, ignore=shutil.ignore_patterns("data", "state", "tables"))
    fill(str(home / "data"))
    return home


def endless(home: Path) -> Path:
    """The example as a stream without an end, on the same checkpoint."""
    file = home / "endless.yml"
    file.write_text((home / "revenue.yml").read_text().replace("trigger: availableNow\n", ""))
    return file


def add_orders(home: Path, first: int, count: int) -> None:
    """More orders, from that one on."""
    with forebay.open(str(home / "data"), SETTINGS) as log:
        append_orders(log.topic("shop/orders"), first, count)


def expected(count: int) -> Revenue:
    """The revenue of so many orders, in those minutes that nothing can be added to any more."""
    sums: dict[tuple[datetime, str], list[Decimal]] = defaultdict(list)
    latest = max(datetime.fromisoformat(order["at"]) for order in orders(0, count))
    for order in orders(0, count):
        at, amount = datetime.fromisoformat(order["at"]), Decimal(order["amount"])
        if amount > 0:
            sums[at.replace(second=0), order["country"]].append(amount)
    until = latest - timedelta(minutes=10)
    return {place: (len(found), sum(found, Decimal())) for place, found in sums.items() if place[0] + _MINUTE <= until}


def in_topic(home: Path) -> Revenue:
    """What the topic holds, each minute once."""
    found: Revenue = {}
    for record in records_of(home, "shop/revenue"):
        value = json.loads(record.value or b"", parse_float=Decimal)
        place = (datetime.fromisoformat(value["minute"]), value["country"])
        assert place not in found, "written twice"
        assert record.key == value["country"].encode() and record.tag == value["country"]
        assert record.timestamp == int(place[0].timestamp() * 1000)
        found[place] = (value["orders"], Decimal(value["revenue"]))
    return found


def in_table(spark: SparkSession, home: Path) -> Revenue:
    """What the table holds, each minute once."""
    rows = spark.read.parquet(str(home / "tables" / "revenue")).selectExpr("*", "unix_seconds(minute) AS at").collect()
    found = {(_utc(row["at"]), row["country"]): (row["orders"], row["revenue"]) for row in rows}
    assert len(found) == len(rows), "written twice"
    return found


def _utc(seconds: int) -> datetime:
    return datetime.fromisoformat("1970-01-01T00:00:00+00:00") + timedelta(seconds=seconds)
