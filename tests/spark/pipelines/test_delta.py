"""Delta tables as sources and sinks of pipelines: by path or by name, and each row of a stream once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

import forebay
from forebay.spark.pipelines.file.document import Flawed
from forebay.spark.pipelines.outline import outline
from tests.ledger import Ledger
from tests.spark.pipelines.delta_child import BATCH
from tests.spark.pipelines.files import flaws_of, pipeline_of, records_of, running_of
from tests.spark.topics import SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PIPELINE = """\
name: p
location: {path: data}
sources:
  - name: orders
    table: ./in
    format: delta
sinks:
  - {name: out, from: orders, topic: shop/out, key: name}
"""
COPY = """\
name: copy
location: {path: data}
sources: [{name: orders, topic: shop/orders, format: text}]
sinks: [{name: out, from: orders, table: shop.copy, format: delta, write: append}]
"""
STREAM = COPY.replace(
    "name: copy\n", "name: copy\nmode: streaming\ncheckpoint: state\ntrigger: availableNow\n"
).replace(", write: append", "")
STREAM = STREAM.replace("format: text}", "format: text, options: {maxOffsetsPerTrigger: 10}}")
RECORDS = 40


@pytest.fixture
def home(tmp_path: Path) -> Path:
    with forebay.open(str(tmp_path / "data"), SETTINGS) as log:
        log.create_topic("shop/orders").append_many([b"%d" % number for number in range(RECORDS)])
        log.create_topic("shop/out")
    rows = pa.table({"id": pa.array([1, 2], pa.int64()), "name": ["a", "b"]})
    write_deltalake(str(tmp_path / "in"), rows)
    return tmp_path


def _values(home: Path) -> list[int]:
    """What other engines see of the table."""
    table = DeltaTable(str(home / "data" / "tables" / "delta" / "shop" / "copy")).to_pyarrow_table()
    return sorted(int(value) for value in table.column("value").to_pylist())


def test_a_table_is_looked_at_before_spark_starts(home: Path) -> None:
    found = outline(pipeline_of(home, PIPELINE)).sources[0]

    assert (found.reads, found.format) == (f"{home}/in", "delta")
    assert found.columns == ("id bigint", "name string")
    assert flaws_of(home, PIPELINE.replace("./in", "./inn"), outline) == [
        f"p.yml:5:12: source orders: there is no Delta table {home}/inn; a path is relative to the pipeline's file, "
        "NAMESPACE.NAME is one in the warehouse of the settings"
    ]
    assert flaws_of(home, PIPELINE.replace("key: name", "key: nme"), outline) == [
        "p.yml:8:53: orders has no column nme: did you mean name?"
    ]


@pytest.mark.parametrize(
    ("before", "after", "flaw"),
    [
        ("./in", "typed", "p.yml:5:12: typed is not a table: write NAMESPACE.NAME, or a path such as ./typed"),
        ("format: delta", "format: delta\n    schema: id INT", "p.yml:7:5: schema does not go with format delta"),
        ("format: delta", "format: dleta", "p.yml:6:13: format of source orders is 'dleta': did you mean delta?"),
        (
            "topic: shop/out, key: name",
            "table: in/, format: delta",
            "p.yml:8:38: source orders reads the table that sink out writes",
        ),
        (
            "topic: shop/out, key: name",
            "table: ./o, format: delta, partitionBy: id",
            "p.yml:8:58: partitionBy does not go with format delta in sink out",
        ),
    ],
)
def test_words_that_do_not_fit_are_reported_with_their_line(home: Path, before: str, after: str, flaw: str) -> None:
    flaws = flaws_of(home, PIPELINE.replace(before, after))

    assert [one for one in flaws if one.startswith(flaw)] != [], flaws


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("table: ./out, format: delta", "table: out/../out/, format: delta"),
        ("table: ./out, format: delta", "table: 'file:{home}/out'"),
        ("table: ./out, format: delta", "table: 'file://{home}//out', format: delta"),
        ("table: link/out", "table: out"),
        ("table: 's3a://b/t', format: delta", "table: 's3://b//t/', format: delta"),
        ("table: shop.copy, format: delta", "table: ./data/tables/delta/shop/copy, format: delta"),
    ],
)
def test_two_sinks_of_one_table_are_refused_however_each_names_it(home: Path, one: str, other: str) -> None:
    (home / "link").symlink_to(home)
    sinks = f"  - {{name: one, from: orders, {one}, write: overwrite}}\n  - {{name: other, from: orders, {other}}}\n"
    text = PIPELINE.partition("  - {name: out")[0] + sinks.replace("{home}", str(home))

    flaws = flaws_of(home, text, outline)

    assert [flaw for flaw in flaws if flaw.endswith("sink one writes the same table: give each its own")], flaws
    read = flaws_of(home, text.replace("./in", f"file:{home}/link/in").replace(one, "table: in"), outline)
    assert [flaw for flaw in read if flaw.endswith("source orders reads the table that sink one writes")], read


def test_tables_of_one_name_in_two_formats_are_two(home: Path) -> None:
    sinks = "".join(
        f"  - {{name: {kind}, from: orders, table: shop.copy, format: {kind}}}\n" for kind in ("delta", "iceberg")
    )

    assert flaws_of(home, PIPELINE.partition("  - {name: out")[0] + sinks, outline) == []


@pytest.mark.spark
@pytest.mark.slow
def test_a_batch_adds_replaces_or_refuses_and_a_table_is_a_source(spark: SparkSession, home: Path) -> None:
    for _ in range(2):
        running_of(pipeline_of(home, COPY)).run(spark)
    assert _values(home) == sorted([*range(RECORDS)] * 2)

    running_of(pipeline_of(home, COPY.replace("append", "overwrite"))).run(spark)
    assert _values(home) == [*range(RECORDS)]
    with pytest.raises(Flawed, match="is there already: write `write: append` or `write: overwrite`"):
        running_of(pipeline_of(home, COPY.replace(", write: append", "")))

    (report,) = running_of(pipeline_of(home, PIPELINE)).run(spark).sinks
    assert report.rows == 2
    assert sorted(record.key or b"" for record in records_of(home, "shop/out")) == [b"a", b"b"]


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_stream_killed_behind_a_commit_or_set_back_brings_every_row_once(
    spark: SparkSession, home: Path, ledger: Ledger
) -> None:
    """A real kill -9 of driver and JVM; then the state that a kill before Spark's commit leaves, made by hand."""
    pipeline = pipeline_of(home, STREAM)
    child = subprocess.run(
        [sys.executable, "-m", "tests.spark.pipelines.delta_child", pipeline.file],
        cwd=Path(__file__).parents[3],
        start_new_session=True,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL
    assert _values(home) == [*range(10 * (BATCH + 1))], "the batch is in the table, and Spark does not know"
    assert f"does batch {BATCH} again" in "\n".join(outline(pipeline).lines())

    running_of(pipeline).run(spark)

    found = _values(home)
    ledger.count("kills", figure="pipeline into Delta", step="behind the commit")
    ledger.violation("kills", n=int(found != [*range(RECORDS)]), figure="pipeline into Delta", step="behind the commit")
    assert found == [*range(RECORDS)]

    commits = (home / "state" / "out" / "commits").iterdir()
    last = max((path for path in commits if path.name.isdigit()), key=lambda path: int(path.name))
    for path in (last, last.with_name(f".{last.name}.crc")):
        path.unlink(missing_ok=True)
    with forebay.open(str(home / "data"), SETTINGS) as log:
        log.topic("shop/orders").append(b"%d" % RECORDS)
    running_of(pipeline).run(spark)

    assert _values(home) == [*range(RECORDS + 1)]
