"""What a pipeline needs around it is looked for before Spark starts: topics, options, files, tables, locations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import forebay
from forebay.errors import Invalid
from forebay.loads.prepare import Sink
from forebay.spark.pipelines.context import Context, place_of
from forebay.spark.pipelines.file.document import Flawed
from forebay.spark.pipelines.file.parsing import load_pipeline
from forebay.spark.pipelines.kinds.topic import TopicSource
from forebay.spark.pipelines.outline import outline
from forebay.spark.tables.staged import StagedTable
from forebay.spark.writing.options import WriteOptions
from tests.spark.pipelines.files import BATCH, SOUND, flaws_of, pipeline_of
from tests.spark.topics import SETTINGS


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A directory with the topics and files that the sound pipeline names."""
    with forebay.open(str(tmp_path / "data"), SETTINGS) as log:
        orders = log.create_topic("shop/orders", partitions=2)
        orders.append_many([b"{}"] * 30, partition=0)
        orders.append_many([b"{}"] * 12, partition=1)
        log.create_topic("shop/revenue")
        log.create_topic("shop/private", durability="ephemeral")
    (tmp_path / "shops.csv").write_text("a,DE\n")
    yield tmp_path


WRONG: Final = {
    "unknown topic": ("shop/orders", "shop/ordes", "9:12", "did you mean shop/orders?"),
    "unknown topic of a sink": ("shop/revenue", "shop/revnue", "31:12", "did you mean shop/revenue?"),
    "far topic": ("shop/orders", "weather/all", "9:12", "the topics are: shop/orders, shop/private, shop/revenue"),
    "private topic": ("shop/orders", "shop/private", "9:12", 'lives on engine "memory"'),
    "unknown option": ("    watermark", "    options: {maxOfsets: 5}\n    watermark", "14:15", "did you mean maxOff"),
    "own word": (
        "    watermark",
        "    options: {topic: a/b}\n    watermark",
        "14:15",
        "write `topic:` in source orders",
    ),
    "place": ("    watermark", "    options: {path: x}\n    watermark", "14:15", "path is not an option of a topic"),
    "option value": (
        "    watermark",
        "    options: {failOnDataLoss: perhaps}\n    watermark",
        "14:15",
        "write true or false",
    ),
    "offsets": (
        "    watermark",
        "    startingOffsets: early\n    watermark",
        "14:22",
        "write earliest, latest or JSON",
    ),
    "no files": ("files: shops.csv", "files: shop.csv", "16:12", "relative to the pipeline's file"),
    "sink option": (
        "    key: min",
        "    options: {attachTimout: 5}\n    key: min",
        "32:15",
        "did you mean attachTimeout?",
    ),
    "sink option value": (
        "    key: min",
        "    options: {attachTimeout: soon}\n    key: min",
        "32:15",
        "write seconds",
    ),
    "no data directory": ("path: data", "path: dta", None, "is not a Forebay data directory"),
    "unknown location": ("path: data", "store: ftp://x", "6:3", "s3://bucket/prefix"),
    "secret": ("path: data", "path: data\n  store.options: secret_access_key=abc", "7:3", "as plain text"),
    "spark setting": ("mode: streaming", "mode: streaming\nspark: {shuffle: 5}", "3:9", "they begin with `spark.`"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_there_is_reported_with_its_line(case: str, home: Path) -> None:
    before, after, place, text = WRONG[case]
    if place is None:
        with pytest.raises(Invalid, match=text):
            outline(pipeline_of(home, SOUND.replace(before, after, 1)))
        return

    flaws = flaws_of(home, SOUND.replace(before, after, 1), outline)

    assert any(flaw.startswith(f"p.yml:{place}: ") and text in flaw for flaw in flaws), flaws


def test_a_stream_that_has_begun_needs_its_start_no_more(home: Path) -> None:
    """A partition was added since: the offsets of its file do not name it, and its checkpoint counts."""
    text = SOUND.replace(
        "    format: json\n", '    startingOffsets: {shop/orders: {"0": 0, "1": 0}}\n    format: json\n', 1
    )
    assert [extent.partition for extent in outline(pipeline_of(home, text)).sources[0].extents] == [0, 1]
    with forebay.open(str(home / "data"), SETTINGS) as log:
        log.alter_topic("shop/orders", partitions=3)
    with pytest.raises(Invalid, match='option "startingOffsets" leaves out partition 2'):
        outline(pipeline_of(home, text))

    begun = home / "state" / "by_topic" / "offsets"
    begun.mkdir(parents=True)
    (begun / "0").write_text("v1\n{}\n{}\n")

    assert outline(pipeline_of(home, text)).sources[0].extents == ()
    elsewhere = text.replace("checkpoint: state", "checkpoint: s3a://state/of/others")
    assert outline(pipeline_of(home, elsewhere)).sources[0].extents == ()
    with pytest.raises(Invalid, match='option "startingOffsets" leaves out partition 2'):
        outline(pipeline_of(home, text.replace("mode: streaming\ntrigger: availableNow\ncheckpoint: state\n", "")))


def test_a_table_that_is_there_is_not_touched_unless_asked(home: Path) -> None:
    (home / "out" / "revenue").mkdir(parents=True)
    (home / "out" / "revenue" / "part-0.parquet").touch()

    assert "is there already: write `write: overwrite`" in flaws_of(home, BATCH, outline)[0]
    overwriting = BATCH + "    write: overwrite\n"
    outline(pipeline_of(home, overwriting))
    (home / "out" / "revenue" / "diary.txt").touch()
    assert "holds more than a table of Parquet files" in flaws_of(home, overwriting, outline)[0]
    assert (
        "s3a://lake/x: a batch writes its table into a directory"
        in flaws_of(home, BATCH.replace("out/revenue", "s3a://lake/x"), outline)[0]
    )


def test_a_stream_goes_on_only_with_a_table_of_its_own_checkpoint(home: Path) -> None:
    table = home / "out" / "revenue"
    table.mkdir(parents=True)
    outline(pipeline_of(home, SOUND))
    (table / "part-0.parquet").touch()
    assert "was not filled by a stream" in flaws_of(home, SOUND, outline)[0]

    (table / "_spark_metadata").mkdir()
    assert "was filled from another checkpoint" in flaws_of(home, SOUND, outline)[0]

    (home / "state" / "by_table").mkdir(parents=True)
    (home / "state" / "by_table" / "metadata").touch()
    outline(pipeline_of(home, SOUND))


def test_the_outline_says_what_would_be_read_and_where_sinks_stand(home: Path) -> None:
    offsets = home / "state" / "by_topic" / "offsets"
    offsets.mkdir(parents=True)
    (offsets.parent / "commits").mkdir()
    point = '{"version":1,"topics":{"shop/orders":{"id":"%s","partitions":{"0":{"offset":7,"epoch":1}}}}}' % ("0" * 32)
    (offsets / "3").write_text(f'v1\n{{"batchWatermarkMs":0}}\n{point}')
    (offsets.parent / "commits" / "3").touch()
    (offsets / "4.tmp").touch()

    found = outline(pipeline_of(home, SOUND.replace("FROM named", "FROM orders")))

    orders, shops = found.sources
    assert [(extent.partition, extent.start, extent.stop) for extent in orders.extents] == [(0, 0, 30), (1, 0, 12)]
    assert orders.records == 42 and orders.bytes > 0 and orders.watermark == "at delayed by 10 minutes"
    assert shops.reads == f"{home}/shops.csv" and shops.columns == ("shop string", "country string")
    assert [step.reads for step in found.steps] == [("orders", "shops"), ("orders",)]
    by_topic, by_table = found.sinks
    assert (by_topic.batch, by_topic.committed, by_topic.offsets) == (3, True, {"shop/orders": {0: 7}})
    assert (by_table.batch, by_table.checkpoint) == (None, f"{home}/state/by_table")
    assert found.trigger == "availableNow" and found.plain()["pipeline"] == "revenue"
    lines = "\n".join(found.lines())
    assert "goes on behind batch 3, shop/orders[0] at 7" in lines and "by_table: new" in lines
    assert "shops reaches no sink" in lines and "42 offsets" in lines


def test_a_batch_that_was_not_committed_is_done_again(home: Path) -> None:
    offsets = home / "state" / "by_topic" / "offsets"
    offsets.mkdir(parents=True)
    (offsets / "0").write_text("v1\n{}\n5")

    assert "does batch 0 again" in "\n".join(outline(pipeline_of(home, SOUND)).lines())


def test_a_location_given_here_goes_before_that_of_the_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = pipeline_of(home, SOUND.replace("path: data", "path: elsewhere"))

    assert place_of(pipeline, {"path": f"{home}/data"}) == {"path": f"{home}/data"}
    monkeypatch.chdir(home)
    assert place_of(pipeline, {"path": "data"}) == {"path": f"{home}/data"}
    assert outline(pipeline, {"path": f"{home}/data"}).location == {"path": f"{home}/data"}


def test_a_source_begins_with_what_there_is_unless_it_says_otherwise(home: Path) -> None:
    def options(words: str, text: str = SOUND) -> dict[str, str]:
        pipeline = pipeline_of(home, text.replace("    format: json\n", f"    format: json\n{words}", 1))
        source = pipeline.sources[0]
        assert isinstance(source, TopicSource)
        return source.read_options(Context(pipeline=pipeline, place={}))

    assert options("") == {"topic": "shop/orders", "startingOffsets": "earliest"}
    assert options("    startingOffsets: latest\n")["startingOffsets"] == "latest"
    timed = options("    options: {startingTimestamp: 5}\n")
    assert timed == {"topic": "shop/orders", "startingTimestamp": "5"}
    assert options("    endingOffsets: latest\n", BATCH) == {"topic": "shop/orders", "endingOffsets": "latest"}


def test_a_table_is_replaced_as_a_whole_and_what_a_crash_left_is_mended(tmp_path: Path) -> None:
    table = StagedTable(f"{tmp_path}/out/t")

    def fill(name: str) -> None:
        def write(stage: str) -> None:
            (Path(stage) / "country=DE").mkdir(parents=True)
            (Path(stage) / "country=DE" / name).touch()

        table.replace(write, overwrite=True)

    def shown() -> list[str]:
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())

    fill("a")
    assert shown() == ["out/t/country=DE/a"]
    fill("b")
    assert shown() == ["out/t/country=DE/b"]

    # Ended between the two renames.
    (tmp_path / "out" / "t").rename(tmp_path / "out" / ".t.old")
    (tmp_path / "out" / ".t.new").mkdir()
    table.mend()
    assert shown() == ["out/t/country=DE/b"]
    # Ended before the old one was gone.
    (tmp_path / "out" / ".t.old").mkdir()
    (tmp_path / "out" / ".t.old" / "x").touch()
    fill("c")
    assert shown() == ["out/t/country=DE/c"]

    def broken(stage: str) -> None:
        Path(stage).mkdir()
        raise forebay.Unavailable("no room")

    with pytest.raises(forebay.Unavailable):
        table.replace(broken, overwrite=True)
    assert shown() == ["out/t/country=DE/c"] and not (tmp_path / "out" / ".t.new").exists()

    def never(stage: str) -> None:
        Path(stage).mkdir()

    with pytest.raises(forebay.Conflict, match="was made by another program"):
        table.replace(never, overwrite=False)
    assert shown() == ["out/t/country=DE/c"] and not (tmp_path / "out" / ".t.new").exists()


def test_paths_are_relative_to_the_file_wherever_the_process_is(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline_of(home, SOUND)
    monkeypatch.chdir(home)

    pipeline = load_pipeline("p.yml")

    assert pipeline.path_of("out") == f"{home}/out" and outline(pipeline).location == {"path": f"{home}/data"}


@pytest.mark.parametrize(
    "options",
    [{"queryId": "q"}, {"batchId": "0"}, {"queryId": "q/r", "batchId": "0"}, {"queryId": "q", "batchId": "-1"}],
)
def test_a_batch_of_a_query_is_named_whole(options: dict[str, str], tmp_path: Path) -> None:
    place = {"path": str(tmp_path), "topic": "shop/out"}

    with pytest.raises(Invalid, match="give both, the id of the query and the number"):
        WriteOptions.parse({**place, **options})

    assert WriteOptions.parse({**place, "queryId": "q-1", "batchId": "7"}).sink == Sink(query_id="q-1", batch_id=7)
    assert WriteOptions.parse(place).sink is None


def test_what_is_wrong_in_the_file_and_around_it_is_reported_at_once(home: Path) -> None:
    text = BATCH.replace("shop/orders", "shop/ordes").replace("from: revenue\n    topic", "from: revenu\n    topic")
    file = home / "p.yml"
    file.write_text(text)

    with pytest.raises(Flawed) as wrong:
        outline(load_pipeline(str(file)))
    file.write_text(text.replace("path: data", "path: dta"))
    with pytest.raises(Flawed) as nowhere:
        outline(load_pipeline(str(file)))

    assert [flaw.partition(": ")[2].partition(":")[0] for flaw in wrong.value.flaws] == [
        f"there is no topic shop/ordes in {home}/data",
        "there is no source or step revenu",
    ]
    assert any("there is no source or step revenu" in flaw for flaw in nowhere.value.flaws)
