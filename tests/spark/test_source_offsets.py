"""Offsets by partition that the topics do not have (any more): refused where a batch is planned, not for a stream."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import forebay
from forebay.errors import Invalid
from forebay.spark.source import ForebayDataSource
from tests.spark.topics import SETTINGS, Filled

Change = Callable[[forebay.Storage], object]

CHANGES: dict[str, tuple[Change, str]] = {
    "partition added": (lambda log: log.alter_topic("shop/orders", partitions=2), "leaves out partition 1"),
    "start deleted": (lambda log: log.topic("shop/orders").delete_before(7), r"\[0\]: startingOffsets is 3, .* is 7"),
    "topic joined": (lambda log: log.create_topic("shop/returns"), "leaves out partition 0: shop/returns has"),
}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[forebay.Storage]:
    with forebay.open(str(tmp_path / "data"), SETTINGS) as opened:
        Filled(opened, "shop/orders").many(10)
        yield opened


def _source(tmp_path: Path, **options: str) -> ForebayDataSource:
    starts = json.dumps({"shop/orders": {"0": 3}})
    place = {"path": str(tmp_path / "data"), "topicPattern": "shop/.*"}
    return ForebayDataSource(options={**place, "startingOffsets": starts, **options})


def _sent(source: ForebayDataSource) -> ForebayDataSource:
    """The source in the process that plans, as Spark brings it there."""
    found: ForebayDataSource = pickle.loads(pickle.dumps(source))
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_columns_are_known_whatever_became_of_the_start_and_a_batch_is_refused(
    tmp_path: Path, log: forebay.Storage, change: str
) -> None:
    """Spark asks for the columns of a stream too, one with a checkpoint among them, which needs no start."""
    act, message = CHANGES[change]
    act(log)
    source = _source(tmp_path)

    schema = source.schema()

    assert len(schema.fields) == 8
    for _ in range(2):
        with pytest.raises(Invalid, match=message):
            _sent(source).reader(schema)
    with pytest.raises(Invalid, match=message):
        _source(tmp_path).reader(schema)  # with a schema of the user's own
    with pytest.raises(Invalid, match=message):
        source.streamReader(schema).initialOffset()  # asked where there is no checkpoint alone


@pytest.mark.parametrize("change", CHANGES)
def test_where_an_end_is_given_it_is_a_batch_and_load_names_what_is_wrong(
    tmp_path: Path, log: forebay.Storage, change: str
) -> None:
    act, message = CHANGES[change]
    act(log)

    with pytest.raises(Invalid, match=message):
        _source(tmp_path, endingOffsets="latest").schema()


def test_what_is_refused_at_first_is_decided_by_the_moment_of_the_load(tmp_path: Path, log: forebay.Storage) -> None:
    """A start that comes to be there between load and plan is not read: the DataFrame shows what there was."""
    source = _source(tmp_path, startingOffsets=json.dumps({"shop/orders": {"0": 11}}))
    schema = source.schema()
    log.topic("shop/orders").append_many([b"later"] * 5)

    with pytest.raises(Invalid, match=r"startingOffsets is 11, behind the end at 10"):
        _sent(source).reader(schema)
