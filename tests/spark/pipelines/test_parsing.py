"""Pipeline files: what a sound one becomes, and the line, the column and the way out for everything wrong in one."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, Final

import pytest

from forebay.errors import Invalid
from forebay.spark.pipelines.file.checking import unused
from forebay.spark.pipelines.file.document import Flawed, Place
from forebay.spark.pipelines.file.model import Format, Mode
from forebay.spark.pipelines.file.parsing import load_pipeline
from forebay.spark.pipelines.kinds.files import FileSource
from forebay.spark.pipelines.kinds.parquet import ParquetSink
from forebay.spark.pipelines.kinds.topic import TopicSink, TopicSource
from tests.spark.pipelines.files import BATCH, SOUND, flaws_of, pipeline_of

_ORDERS: Final = "  - name: orders\n    topic: shop/orders\n"
_SCHEMA: Final = "    schema: |\n      order_id STRING,\n      amount DECIMAL(10, 2), at TIMESTAMP\n"
_NAMED: Final = "SELECT * FROM orders JOIN shops USING (shop)"
_LINES: Final = SOUND.splitlines()

AVRO: Final = {
    "type": "record",
    "name": "order",
    "fields": [{"name": "id", "type": "string"}, {"name": "amount", "type": ["null", "double"]}],
}

WRONG: Final = {
    "no name": ("name: revenue\n", "", "1:1", "name is missing in the pipeline: write `name: revenue`"),
    "name with signs": ("name: revenue\n", "name: re venue\n", "1:7", "name of the pipeline is 're venue'"),
    "empty name": ("name: revenue\n", "name:\n", "1:6", "name of the pipeline is empty: write a text"),
    "unknown word": ("checkpoint: state", "chekpoint: state", "4:1", "did you mean checkpoint?"),
    "word given twice": ("mode: streaming\n", "mode: streaming\nmode: batch\n", "3:1", "mode is given twice"),
    "unknown mode": ("mode: streaming", "mode: stream", "2:7", "did you mean streaming?"),
    "no checkpoint": ("checkpoint: state\n", "", "2:1", "checkpoint is missing"),
    "trigger once": ("availableNow", "once", "3:10", "write `trigger: availableNow`"),
    "trigger once, mapping": ("availableNow", "{once: true}", "3:11", "write `trigger: availableNow`"),
    "trigger continuous": ("availableNow", "continuous", "3:10", "processingTime"),
    "trigger unknown": ("availableNow", "sometimes", "3:10", "write `availableNow` or `{processingTime: 10 seconds}`"),
    "trigger near": ("availableNow", "{procesingTime: 1 second}", "3:11", "did you mean processingTime?"),
    "trigger time": ("availableNow", "{processingTime: soon}", "3:27", "write a time such as 10 seconds"),
    "two triggers": ("availableNow", "{availableNow: true, processingTime: 1 second}", "3:31", "exclude each other"),
    "source without name": ("  - name: shops\n    files", "  - files", "15:5", "name is missing in a source"),
    "source of nothing": ("    files: shops.csv\n", "", "15:5", "give one of topic, topics, table, files"),
    "source of two": ("    files: shops.csv\n", "    files: a\n    topic: b\n", "15:5", "has topic and files"),
    "unknown word in a source": ("    format: csv", "    fromat: csv", "17:5", "did you mean format?"),
    "word of another source": (
        "    format: csv",
        "    watermark: {}\n    format: csv",
        "17:5",
        "does not go with files",
    ),
    "unknown format": ("format: json", "format: jsn", "10:13", "did you mean json?"),
    "files without format": ("    format: csv\n", "", "15:5", "format is missing in source shops of files"),
    "json without schema": (_SCHEMA, "", "8:5", "schema is missing in source orders with format json"),
    "topic named twice": (
        "topic: shop/orders",
        "topics: [b, default/b]",
        "9:17",
        "b is the topic default/b, which stands",
    ),
    "bad topic name": ("topic: shop/orders", "topic: shop/or ders", "9:12", "or ders"),
    "bad type": ("at TIMESTAMP", "at TIMESTMP", "13:33", "did you mean TIMESTAMP?"),
    "column twice": ("at TIMESTAMP", "Amount INT", "13:30", "column Amount is there twice"),
    "comma missing": ("order_id STRING,", "order_id STRING", "13:7", "is a comma missing before it?"),
    "bad type on one line": ("country STRING", "country TXT", "18:34", "TXT is not a type"),
    "schema of text": ("format: json", "format: text", "11:5", "schema does not go with format text"),
    "own column": ("order_id STRING", "_offset STRING", "11:13", "that is the record's own offset"),
    "unknown watermark column": ("column: at", "column: att", "14:25", "did you mean at?"),
    "watermark of no time": ("column: at", "column: amount", "14:25", "is decimal(10,2): it must be a timestamp"),
    "watermark without delay": ("{column: at, delay: 10 minutes}", "{column: at}", "14:16", "delay is missing"),
    "watermark delay": ("10 minutes", "10 minuts", "14:36", "write a time such as 10 seconds"),
    "bad records": ("    watermark", "    badRecords: fial\n    watermark", "14:17", "did you mean fail?"),
    "end of a stream": ("    watermark", "    endingOffsets: latest\n    watermark", "14:20", "belongs to a batch"),
    "options that are none": ("    watermark", "    options: 5\n    watermark", "14:14", "write `NAME: VALUE` lines"),
    "option twice": ("    watermark", "    options: {a: 1, a: 2}\n    watermark", "14:21", "a is given twice"),
    "sources are no list": (SOUND[SOUND.index("sources:") :], "sources: orders\n", "7:10", "write a list"),
    "a source is no mapping": (
        _ORDERS,
        "  - orders\n  - name: orders\n    topic: a/b\n",
        "8:5",
        "write it as a mapping",
    ),
    "step without sql": (f"    sql: {_NAMED}\n", "", "20:5", "sql is missing in step named"),
    "empty sql": (f"sql: {_NAMED}", "sql: ''", "21:10", "is empty: write a text"),
    "duplicate name": (
        "- name: named",
        "- name: Orders",
        "20:11",
        "is already the name of a source or a step in line 8",
    ),
    "unknown view": ("FROM orders JOIN", "FROM ordrs JOIN", "21:24", "did you mean orders?"),
    "unknown view in a block": ("FROM named", "FROM namd", "26:12", "did you mean named?"),
    "step reads itself": ("FROM named", "FROM revenue", "26:12", "step revenue reads itself"),
    "step below": ("FROM orders JOIN shops", "FROM revenue JOIN shops", "21:24", "in a circle"),
    "sink of no view": ("from: revenue\n    topic", "from: revenu\n    topic", "30:11", "did you mean revenue?"),
    "sink of nothing": ("    table: out/revenue\n", "", "33:5", "give one of topic, table"),
    "sink of two": ("    table: out/revenue", "    topic: a/b\n    table: c", "33:5", "has topic and table"),
    "unknown word in a sink": ("    key: min", "    kye: min", "32:5", "did you mean key?"),
    "word of another sink": ("    key: minute.start", "    partitionBy: a", "32:5", "does not go with topic"),
    "sink name twice": ("name: by_table", "name: by_topic", "33:11", "is already the name of a sink in line 29"),
    "complete": ("    key: min", "    output: complete\n    key: min", "32:5", "write `output: update`"),
    "raw without value": ("    key: min", "    format: raw\n    key: min", "29:5", "value is missing"),
    "avro without schema": ("    key: min", "    format: avro\n    key: min", "29:5", "schema is missing"),
    "schema of json out": ("    key: min", "    schema: a INT\n    key: min", "32:5", "does not go with format json"),
    "iceberg with partitions": (
        "    table: out",
        "    format: iceberg\n    partitionBy: a\n    table: out",
        "36:5",
        "partitionBy does not go with format iceberg",
    ),
    "no name of a table": ("    table: out", "    format: iceberg\n    table: out", "36:12", "write NAMESPACE.NAME"),
    "unknown table format": ("    table: out", "    format: icebrg\n    table: out", "35:13", "did you mean iceberg?"),
    "append to a directory": ("    table: out", "    write: append\n    table: out", "35:5", "trigger: availableNow"),
    "write in a stream": ("    table: out", "    write: overwrite\n    table: out", "33:11", "belongs to a batch"),
    "own input": ("topic: shop/revenue", "topic: shop/orders", "31:12", "which its source orders reads: endless"),
    "nothing streams": ("FROM orders JOIN shops USING (shop)", "FROM shops", "30:11", "no topic feeds sink by_topic"),
    "no yaml": ("mode: streaming", "mode: [", "4:11", "this is not YAML"),
    "a tab": ("mode: streaming", "\tmode: streaming", "2:1", "this is not YAML"),
    "no sinks": (SOUND[SOUND.index("sinks:") :], "", "1:1", "sinks are missing"),
}


@pytest.mark.parametrize("case", WRONG)
def test_everything_wrong_is_reported_with_its_line_and_the_way_out(case: str, tmp_path: Path) -> None:
    before, after, place, text = WRONG[case]
    assert SOUND.count(before) >= 1, "the case changes something"

    flaws = flaws_of(tmp_path, SOUND.replace(before, after, 1))

    assert any(flaw.startswith(f"p.yml:{place}: ") and text in flaw for flaw in flaws), flaws


@pytest.mark.parametrize(
    ("before", "after", "place", "text"),
    [
        ("mode: batch", "mode: batch\ntrigger: availableNow", "3:1", "trigger belongs to a streaming pipeline"),
        ("mode: batch", "mode: batch\ncheckpoint: state", "3:1", "checkpoint belongs to a streaming pipeline"),
        ("    key: min", "    output: update\n    key: min", "27:11", "output of sink by_topic belongs to a streaming"),
        ("out/revenue", "shops.csv", "33:12", "source shops reads the table that sink by_table writes"),
    ],
)
def test_what_belongs_to_a_stream_is_refused_in_a_batch(
    before: str, after: str, place: str, text: str, tmp_path: Path
) -> None:
    assert flaws_of(tmp_path, BATCH) == []

    flaws = flaws_of(tmp_path, BATCH.replace(before, after, 1))

    assert [flaw for flaw in flaws if flaw.startswith(f"p.yml:{place}: ") and text in flaw] == flaws != []


def test_all_that_is_wrong_is_reported_at_once_by_line(tmp_path: Path) -> None:
    text = SOUND.replace("at TIMESTAMP", "at TIMESTMP").replace("10 minutes", "soon").replace("key: min", "kye: min")

    flaws = flaws_of(tmp_path, text)

    assert [flaw.split(": ")[0] for flaw in flaws] == ["p.yml:13:33", "p.yml:14:36", "p.yml:32:5"]


def test_a_sound_file_becomes_a_pipeline(tmp_path: Path) -> None:
    pipeline = pipeline_of(tmp_path, SOUND)

    orders, shops = pipeline.sources
    by_topic, by_table = pipeline.sinks
    assert (pipeline.name, pipeline.mode, pipeline.trigger.available_now) == ("revenue", Mode.STREAMING, True)
    assert isinstance(orders, TopicSource) and isinstance(shops, FileSource)
    assert orders.topics == ("shop/orders",) and orders.format is Format.JSON
    assert (
        orders.schema is not None and orders.schema.ddl == "`order_id` string, `amount` decimal(10,2), `at` timestamp"
    )
    assert [name for name, _ in orders.columns][:4] == ["order_id", "amount", "at", "_key"]
    assert orders.watermark is not None and orders.watermark.delay == "10 minutes"
    assert [step.name for step in pipeline.steps] == ["named", "revenue"]
    assert isinstance(by_topic, TopicSink) and by_topic.expressions == {"key": "minute.start"}
    assert isinstance(by_table, ParquetSink) and by_table.writes(pipeline) == f"{tmp_path}/out/revenue"
    assert pipeline.checkpoint_of(by_table) == f"{tmp_path}/state/by_table"
    assert pipeline.path_of("s3a://lake/revenue") == "s3a://lake/revenue"
    assert unused(pipeline) == ()


def test_what_reaches_no_sink_is_known(tmp_path: Path) -> None:
    pipeline = pipeline_of(tmp_path, SOUND.replace("FROM named", "FROM orders"))

    assert unused(pipeline) == ("shops", "named")


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("topics: [shop/orders, shop/returns]", ("shop/orders", "shop/returns")),
        ("topics: shop/orders", ("shop/orders",)),
    ],
)
def test_topics_may_be_several(words: str, where: tuple[str, ...], tmp_path: Path) -> None:
    source = pipeline_of(tmp_path, SOUND.replace("topic: shop/orders", words, 1)).sources[0]

    assert isinstance(source, TopicSource) and source.topics == where


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("earliest", "earliest"),
        ('\'{"shop/orders": {"0": 5}}\'', '{"shop/orders": {"0": 5}}'),
        ("{shop/orders: {'0': 5}}", '{"shop/orders":{"0":5}}'),
    ],
)
def test_offsets_are_a_word_or_a_mapping(written: str, meant: str, tmp_path: Path) -> None:
    text = SOUND.replace("    format: json\n", f"    format: json\n    startingOffsets: {written}\n", 1)

    source = pipeline_of(tmp_path, text).sources[0]

    assert isinstance(source, TopicSource) and source.starting == meant


def test_an_avro_schema_comes_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "order.avsc").write_text(json.dumps(AVRO))
    text = (
        "name: p\nsources:\n  - {name: orders, topic: shop/orders, format: avro, schema: order.avsc}\n"
        "sinks:\n  - {name: out, from: orders, table: out}\n"
    )

    source = pipeline_of(tmp_path, text).sources[0]

    assert isinstance(source, TopicSource) and source.schema is not None
    assert source.schema.columns == (("id", "string"), ("amount", "double")) and source.schema.avro == AVRO


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot read the Avro schema"),
        ("{", "is not JSON"),
        ('"string"', "is not one of a record"),
        ('{"type": "record", "name": "a", "fields": []}', "has no fields"),
    ],
)
def test_an_avro_schema_that_is_none_is_reported_at_its_name(content: str | None, text: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "order.avsc").write_text(content)
    flaws = flaws_of(
        tmp_path,
        "name: p\nsources:\n  - name: orders\n    topic: a/b\n    format: avro\n    schema: order.avsc\n"
        "sinks:\n  - {name: out, from: orders, table: out}\n",
    )

    assert len(flaws) == 1 and flaws[0].startswith("p.yml:6:13: ") and text in flaws[0]


@pytest.mark.parametrize(
    ("words", "text"),
    [("key: oid", "source"), ("tag: _tga", "did you mean _tag?"), ("value: [order_id, amont]", "did you mean amount?")],
)
def test_columns_of_a_sink_that_takes_a_source_as_it_is_are_checked(words: str, text: str, tmp_path: Path) -> None:
    head, _, _ = SOUND.partition("steps:")
    sink = f"sinks:\n  - name: out\n    from: orders\n    topic: shop/copy\n    {words}\n"

    flaws = flaws_of(tmp_path, head + sink)

    assert len(flaws) == 1 and flaws[0].startswith("p.yml:23:") and "orders has no column" in flaws[0]
    assert text == "source" or text in flaws[0]


def test_a_file_that_cannot_be_read_or_is_empty_is_reported(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="cannot read .*gone.yml: No such file"):
        load_pipeline(str(tmp_path / "gone.yml"))
    (tmp_path / "empty.yml").write_text("# nothing\n")
    with pytest.raises(Flawed, match="empty.yml:1:1: the file is empty"):
        load_pipeline(str(tmp_path / "empty.yml"))
    (tmp_path / "bytes.yml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Flawed, match="this is not YAML"):
        load_pipeline(str(tmp_path / "bytes.yml"))
    (tmp_path / "large.yml").write_bytes(b"#" * (1024 * 1024 + 1))
    with pytest.raises(Invalid, match="is it the right file"):
        load_pipeline(str(tmp_path / "large.yml"))
    (tmp_path / "list.yml").write_text("- name: revenue\n")
    with pytest.raises(Flawed, match="list.yml:1:1: the pipeline is a list: write it as a mapping"):
        load_pipeline(str(tmp_path / "list.yml"))


def test_words_know_where_a_part_of_them_stands(tmp_path: Path) -> None:
    steps = pipeline_of(tmp_path, SOUND).steps
    file = str(tmp_path / "p.yml")

    assert steps[0].sql.place_of(1, 8) == Place(file, 21, 17) and _LINES[20][16:].startswith("* FROM")
    assert steps[1].sql.place_of(2, 8) == Place(file, 25, 14) and _LINES[24][13:].startswith("sum(")


def test_errors_and_words_survive_the_way_to_another_process(tmp_path: Path) -> None:
    def returned(value: Any) -> Any:
        return pickle.loads(pickle.dumps(value))

    word = pipeline_of(tmp_path, SOUND).name
    assert type(returned(word)) is str and returned(word) == word
    assert returned(Flawed("a", "b")).flaws == ("a", "b")


def test_a_format_that_is_misspelt_is_one_flaw_with_nothing_that_follows_from_it(tmp_path: Path) -> None:
    of_topic = flaws_of(tmp_path, BATCH.replace("format: json", "format: jsn", 1))
    of_files = flaws_of(tmp_path, BATCH.replace("format: csv", "format: cvs", 1))

    assert [flaw.partition(": ")[2] for flaw in of_topic] == ["format of source orders is 'jsn': did you mean json?"]
    assert [flaw.partition(": ")[2] for flaw in of_files] == ["format of source shops is 'cvs': did you mean csv?"]
