"""What callers get wrong: each a clear error that names the thing, nothing appended, nothing changed."""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import forebay
from forebay import Invalid, Position, Settings, Storage, Topic
from forebay.records import OFFSET_MAX
from tests.storage.rig import QUICK, values

NAMES = [
    "",
    "/",
    "//",
    "a/",
    "/a/",
    "/a//b",
    "a//b",
    "a/b/c",
    "..",
    ".",
    "../etc",
    "a/..",
    "a/.",
    "a/../../b",
    "x" * 300,
    "a/" + "x" * 101,
    "a\0b",
    "a b",
    "a\nb",
    "a\\b",
    "t\N{CYRILLIC SMALL LETTER O}pic",
    "topic\N{FULLWIDTH SOLIDUS}a",
    "\N{DIVISION SLASH}a",
    "a\N{ZERO WIDTH SPACE}",
    "\ud800",
    "~",
    "%2e%2e",
    "-" * 101,
    None,
    5,
    b"topic",
    ["topic"],
    Path("topic"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad") / "log"


@pytest.fixture(scope="module")
def log(path: Path) -> Iterator[Storage]:
    """One for all tests: none of them may change it."""
    with forebay.open(path, QUICK) as log:
        log.create_topic("t", partitions=2).append(b"kept", partition=0)
        yield log


@pytest.fixture
def topic(log: Storage) -> Iterator[Topic]:
    topic = log.topic("t")
    yield topic
    assert [topic.offsets(partition).next for partition in (0, 1)] == [1, 0]
    assert values(topic.read()) == [b"kept"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.proves("I30")
def test_what_is_no_name_is_refused_everywhere_and_makes_no_file(log: Storage, path: Path, name: Any) -> None:
    before = sorted(path.parent.rglob("*"))

    for call in (log.create_topic, log.topic, log.delete_topic):
        with pytest.raises(Invalid, match="topic name") as raised:
            call(name)
        assert len(str(raised.value)) < 400
        assert "\0" not in str(raised.value)

    assert [spec.topic for spec in log.topics()] == ["t"]
    assert sorted(path.parent.rglob("*")) == before


@pytest.mark.parametrize(
    "definition",
    [
        {"partitions": 0},
        {"partitions": -1},
        {"partitions": 1025},
        {"partitions": 1.5},
        {"partitions": "2"},
        {"partitions": True},
        {"partitions": None},
        {"durability": "strong"},
        {"durability": 5},
        {"durability": ["disk"]},
        {"engine": "tape"},
        {"engine": {}},
        {"compression": "zip"},
        {"compression": "zstd:99"},
        {"compression": "zstd:"},
        {"compression": 3},
        {"compression": None},
        {"cap_records": 0},
        {"cap_bytes": 1.5},
        {"ttl_ms": "7d"},
        {"on_full": "reject_new"},
        {"cleanup": None},
        {"compact_lag_ms": -1},
        {"retention_ms": 5},
    ],
    ids=str,
)
def test_what_is_no_definition_is_refused_and_names_the_field(log: Storage, definition: dict[str, Any]) -> None:
    """`partitions=True` was stored as a truth value, which no one could read again."""
    with pytest.raises(Invalid, match=next(iter(definition))):
        log.create_topic("new", **definition)

    assert [spec.topic for spec in log.topics()] == ["t"]


WRONG_RECORDS: list[tuple[str, Callable[[Topic], object]]] = [
    ("value is str.*encode", lambda t: t.append("text")),  # type: ignore[arg-type]
    ("value is int", lambda t: t.append(5)),  # type: ignore[arg-type]
    ("value is list", lambda t: t.append([b"v"])),  # type: ignore[arg-type]
    ("key is int", lambda t: t.append(b"v", key=5)),  # type: ignore[arg-type]
    ("key is str.*encode", lambda t: t.append(b"v", key="k")),  # type: ignore[arg-type]
    ("tag is bytes", lambda t: t.append(b"v", tag=b"x")),  # type: ignore[arg-type]
    ("tag is list", lambda t: t.append(b"v", tag=["x"])),  # type: ignore[arg-type]
    ("tag has 0 bytes", lambda t: t.append(b"v", tag="")),
    ("tag has 1025 bytes", lambda t: t.append(b"v", tag="x" * 1025)),
    ("UTF-8", lambda t: t.append(b"v", tag="\ud800")),
    ("headers are", lambda t: t.append(b"v", headers=5)),  # type: ignore[arg-type]
    ("headers are", lambda t: t.append(b"v", headers=0)),  # type: ignore[arg-type]
    ("headers are", lambda t: t.append(b"v", headers=["h"])),  # type: ignore[list-item]
    ("header 'h' is str", lambda t: t.append(b"v", headers={"h": "v"})),  # type: ignore[arg-type]
    ("header's name is bytes", lambda t: t.append(b"v", headers={b"h": b"v"})),  # type: ignore[arg-type]
    ("1001 headers", lambda t: t.append(b"v", headers=[("h", b"")] * 1001)),
    ("UTF-8", lambda t: t.append(b"v", headers={"\ud800": b""})),
    ("timestamp is str", lambda t: t.append(b"v", timestamp="now")),  # type: ignore[arg-type]
    ("timestamp is float", lambda t: t.append(b"v", timestamp=1.5)),  # type: ignore[arg-type]
    ("timestamp is bool", lambda t: t.append(b"v", timestamp=True)),
    ("timestamp is", lambda t: t.append(b"v", timestamp=2**63)),
    ("timestamp is", lambda t: t.append(b"v", timestamp=-(2**63))),
    ("partition is 2; this topic has 0 to 1", lambda t: t.append(b"v", partition=2)),
    ("partition is -1", lambda t: t.append(b"v", partition=-1)),
    ("partition is str", lambda t: t.append(b"v", partition="0")),  # type: ignore[arg-type]
    ("partition is float", lambda t: t.append(b"v", partition=0.0)),  # type: ignore[arg-type]
    ("partition is bool", lambda t: t.append(b"v", partition=True)),
    ("give both", lambda t: t.append(b"v", producer=1)),
    ("give both", lambda t: t.append(b"v", sequence=1)),
    ("producer is 0", lambda t: t.append(b"v", producer=0, sequence=0)),
    ("producer is", lambda t: t.append(b"v", producer=2**64, sequence=0)),
    ("producer is 'p'", lambda t: t.append(b"v", producer="p", sequence=0)),  # type: ignore[arg-type]
    ("sequence is -1", lambda t: t.append(b"v", producer=1, sequence=-1)),
    ("sequence is '0'", lambda t: t.append(b"v", producer=1, sequence="0")),  # type: ignore[arg-type]
    ("bytes in one append", lambda t: t.append(b"x" * (8 << 20))),
    ("bytes in one append", lambda t: t.append(b"v", key=b"x" * (8 << 20))),
    ("bytes in one append", lambda t: t.append(b"v", headers={"h": b"x" * (8 << 20)})),
]
WRONG_BATCHES: list[tuple[str, Callable[[Topic], object]]] = [
    ("values is bytes: give a sequence", lambda t: t.append_many(b"ab")),  # type: ignore[arg-type]
    ("values is str", lambda t: t.append_many("ab")),  # type: ignore[arg-type]
    ("values is int", lambda t: t.append_many(5)),  # type: ignore[arg-type]
    (r"values\[1\] is int", lambda t: t.append_many([b"a", 1])),  # type: ignore[list-item]
    ("1 keys for 2 records", lambda t: t.append_many([b"a", b"b"], keys=[b"k"])),
    (r"keys\[0\] is str", lambda t: t.append_many([b"a"], keys=["k"])),  # type: ignore[list-item]
    ("keys is bytes", lambda t: t.append_many([b"a"], keys=b"k")),  # type: ignore[arg-type]
    ("3 tags for 2 records", lambda t: t.append_many([b"a", b"b"], tags=["x"] * 3)),
    ("tag is int", lambda t: t.append_many([b"a", b"b"], tags=["x", 1])),  # type: ignore[list-item]
    ("tag is list", lambda t: t.append_many([b"a", b"b"], tags=["x", ["y"]])),  # type: ignore[list-item]
    ("tags is int", lambda t: t.append_many([b"a"], tags=5)),  # type: ignore[arg-type]
    ("1 timestamps for 2", lambda t: t.append_many([b"a", b"b"], timestamps=[1])),
    ("timestamps are milliseconds", lambda t: t.append_many([b"a"], timestamps=[1.5])),  # type: ignore[list-item]
    ("timestamps", lambda t: t.append_many([b"a"], timestamps="x")),  # type: ignore[arg-type]
    ("timestamp is", lambda t: t.append_many([b"a"], timestamps=[2**63])),
    ("1 headers for 2", lambda t: t.append_many([b"a", b"b"], headers=[{}])),
    ("headers are", lambda t: t.append_many([b"a"], headers=[5])),  # type: ignore[list-item]
    ("give a sequence", lambda t: t.append_many([b"a"], headers={"h": b"v"})),  # type: ignore[arg-type]
    ("partition is 9", lambda t: t.append_many([b"a"], partition=9)),
    ("partition is str", lambda t: t.append_many([b"a"], partition="x")),  # type: ignore[arg-type]
    ("bytes in one append", lambda t: t.append_many([b"x" * (1 << 20)] * 9)),
    ("bytes in one append", lambda t: t.append_many([b"x" * (9 << 20)], atomic=False)),
    ("not a pyarrow.RecordBatch", lambda t: t.append_arrow([b"a"])),
    ("to_batches", lambda t: t.append_arrow(pa.table({"value": [b"a"]}))),
    ("no column 'value'", lambda t: t.append_arrow(pa.record_batch({"key": [b"a"]}))),
    ("unknown column", lambda t: t.append_arrow(pa.record_batch({"value": [b"a"], "extra": [1]}))),
    ("value", lambda t: t.append_arrow(pa.record_batch({"value": [1]}))),
    ("key", lambda t: t.append_arrow(pa.record_batch({"value": [b"a"], "key": [1]}))),
    ("partition is 9", lambda t: t.append_arrow(pa.record_batch({"value": [b"a"]}), partition=9)),
]
WRONG_PLACES: list[tuple[str, Callable[[Topic], object]]] = [
    ("offset is -1", lambda t: t.read(-1, partition=0)),
    ("offset is", lambda t: t.read(OFFSET_MAX + 1, partition=0)),
    ("offset is '1'", lambda t: t.read(Position("offset", "1"), partition=0)),  # type: ignore[arg-type]
    ("start is 'x'", lambda t: t.read("x")),  # type: ignore[arg-type]
    ("start is None", lambda t: t.read(None)),  # type: ignore[arg-type]
    ("start is True", lambda t: t.read(True)),
    ("start is", lambda t: t.read(Position("bogus", 1), partition=0)),
    ("timestamp is", lambda t: t.read(Position.at_time(2**63))),
    ("timestamp is str", lambda t: t.read(Position.at_time("now"))),  # type: ignore[arg-type]
    ("offset is -1", lambda t: t.read(stop=-1)),
    ("stop is True", lambda t: t.follow(stop=True)),  # type: ignore[arg-type]
    ("values is None", lambda t: t.append_many(None)),  # type: ignore[arg-type]
    ("offset is 'x'", lambda t: t.read(stop="x")),  # type: ignore[arg-type]
    ("name the partition", lambda t: t.read(1)),
    ("partition is 2", lambda t: t.read(partition=2)),
    ("partition is -1", lambda t: t.read_arrow(partition=-1)),
    ("partition is str", lambda t: t.follow(partition="0")),  # type: ignore[arg-type]
    ("start is 1.0", lambda t: t.follow(1.0)),  # type: ignore[arg-type]
    ("timeout is -1", lambda t: t.follow(timeout=-1)),
    ("timeout is 'x'", lambda t: t.follow(timeout="x")),  # type: ignore[arg-type]
    ("timeout is nan", lambda t: t.follow(timeout=float("nan"))),
    ("partition is 2", lambda t: t.offsets(2)),
    ("partition is NoneType", lambda t: t.offsets(None)),  # type: ignore[arg-type]
    ("timestamp is str", lambda t: t.offset_at_time("now")),  # type: ignore[arg-type]
    ("partition is 5", lambda t: t.offset_at_time(1, 5)),
    ("partition is 5", lambda t: t.recovery(5)),
    ("partition is 5", lambda t: t.failure(5)),
    ("partition is 5", lambda t: t.last_sequence(1, 5)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("said", "call"), [*WRONG_RECORDS, *WRONG_BATCHES, *WRONG_PLACES])
def test_what_cannot_be_is_refused_and_leaves_no_trace(
    topic: Topic, said: str, call: Callable[[Topic], object]
) -> None:
    with pytest.raises(Invalid, match=said) as raised:
        call(topic)

    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(("said", "call"), WRONG_RECORDS[:3] + WRONG_RECORDS[17:26])
def test_appends_that_are_not_waited_for_are_checked_as_well(
    topic: Topic, said: str, call: Callable[[Topic], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic, "append", topic.append_nowait)
    with pytest.raises(Invalid, match=said):
        call(topic)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"wal": {"nonsense": 1}}, "wal.nonsense"),
        ({"walk": {}}, "walk"),
        ({"wal": {"sync_interval_ms": 0}}, "wal.sync_interval_ms is 0; allowed"),
        ({"wal": {"sync_interval_ms": "soon"}}, "wal.sync_interval_ms is 'soon'"),
        ({"wal": 5}, "wal is 5"),
        ({5: {}}, "5"),
        ("wal", "overrides holds 'wal'"),
        (5, "overrides holds 5"),
        ({"metadata": {"prefix": "no slash"}}, "metadata.prefix"),
    ],
    ids=str,
)
def test_what_is_no_setting_is_refused_by_name_before_anything_is_made(
    tmp_path: Path, settings: Any, said: str
) -> None:
    with pytest.raises(Invalid, match=said):
        forebay.open(tmp_path / "log", settings)

    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("path", ["", "a\0b", 5, b"bytes", ["log"]], ids=ascii)
@pytest.mark.parametrize("read_only", [False, True])
def test_what_is_no_path_is_refused(path: Any, read_only: bool) -> None:  # noqa: FBT001
    with pytest.raises(Invalid, match="is not the path of a directory"):
        Storage.open(path, Settings(), read_only=read_only)


@pytest.mark.parametrize(("read_only", "said"), [(False, "needs a data directory"), (True, "name one")])
def test_no_path_is_for_readers_of_what_is_shared_alone(read_only: bool, said: str) -> None:  # noqa: FBT001
    with pytest.raises(Invalid, match=f"path is None.*{said}"):
        Storage.open(None, Settings(), read_only=read_only)


@pytest.mark.parametrize("size", [10, 2_000])
@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ("text", "is str, not bytes or None; encode it first"),
        (np.zeros(8, np.uint8), "is ndarray, not bytes or None"),
        (array.array("B", [1, 2]), "is array, not bytes or None"),
        (7, "is int, not bytes or None"),
    ],
    ids=["str", "ndarray", "array", "int"],
)
def test_what_is_no_bytes_is_refused_in_a_batch_of_any_size(topic: Topic, size: int, odd: Any, said: str) -> None:
    """Also what could be joined with bytes."""
    for count in (5, 300):
        column = [bytes(size)] * count
        column[3] = odd
        with pytest.raises(Invalid, match=rf"values\[3\] {said}"):
            topic.append_many(column, partition=0)
        with pytest.raises(Invalid, match=rf"keys\[3\] {said}"):
            topic.append_many([b"v"] * count, keys=column, partition=0)
