"""Errors carry their values as attributes: through pickling and copying, for every class, and from where they arise."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay.appends.ticket import Ticket
from forebay.errors import (
    Conflict,
    DataLoss,
    ForebayError,
    Full,
    Moved,
    Throttled,
    UnknownTopic,
)
from forebay.reading import report_gap
from forebay.records import Gap, Reason
from forebay.testing.inside import inside


def test_message_and_detail_of_every_error_survive_pickling_and_copying() -> None:
    kinds = set(_error_classes())
    assert len(kinds) >= 20

    for kind in kinds:
        fields = [name for name, _ in _keywords(kind) if name != "shard"]
        error = kind("what happened", "and what to do", **{name: index for index, name in enumerate(fields)})
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(again) is kind
            assert again.args == ("what happened", "and what to do")
            assert again.detail == error.detail
            assert set(error.detail) == set(fields), kind


def test_every_error_is_made_from_its_message_alone_and_then_has_no_detail() -> None:
    for kind in _error_classes():
        error = kind("what happened")
        assert str(error) == "what happened"
        assert error.detail == {}
        assert all(getattr(error, name) is None for name, _ in _keywords(kind) if name != "shard")


def test_an_error_in_other_words_keeps_its_detail() -> None:
    error = Moved("elsewhere", shard="shop/orders[3]", holder="d1")
    error.add_note("a note")

    again = error.restated("not here")

    assert (str(again), again.detail) == ("not here", {"topic": "shop/orders", "partition": 3, "holder": "d1"})
    assert type(again) is Moved
    assert str(error) == "elsewhere"


@pytest.mark.parametrize("name", ["shop/orders", "a log", "shop/orders[x]"])
def test_a_shard_without_a_number_leaves_the_partition_open(name: str) -> None:
    assert Full("full", shard=name).partition is None


def test_unknown_and_existing_topics_are_named(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log:
        log.create_topic("orders")
        with pytest.raises(UnknownTopic) as unknown:
            log.topic("shop/none")
        with pytest.raises(Conflict) as existing:
            log.create_topic("orders")

    assert unknown.value.topic == "shop/none"
    assert existing.value.topic == "default/orders"


def test_a_sequence_out_of_step_says_which_one_would_be_accepted() -> None:
    with forebay.open(":memory:") as log:
        topic = log.create_topic("orders")
        topic.append(b"first", producer=7, sequence=0)
        with pytest.raises(Conflict) as refused:
            topic.append(b"third", producer=7, sequence=2)

    assert (refused.value.producer, refused.value.sequence, refused.value.expected) == (7, 2, 1)


def test_a_full_topic_is_named_with_its_partition() -> None:
    with forebay.open(":memory:") as log:
        topic = log.create_topic("orders", cap_records=1, on_full="reject_new")
        topic.append(b"first")
        with pytest.raises(Full) as refused:
            topic.append(b"second")

    assert (refused.value.topic, refused.value.partition) == ("default/orders", 0)


def test_a_full_queue_says_how_much_waits(tmp_path: Path) -> None:
    with forebay.open(tmp_path, {"wal": {"queue_records_max": 1}}) as log:
        topic = log.create_topic("orders")
        inside(topic).leave_queued()
        waiting = topic.append_nowait(b"waits")
        with pytest.raises(Throttled) as refused:
            _ = topic.append_nowait(b"refused")

    assert waiting.partition == 0
    assert refused.value.detail["records"] == 1
    assert "1 records" in str(refused.value)


def test_a_lost_range_is_named_by_offsets_and_reason() -> None:
    with pytest.raises(DataLoss) as lost:
        report_gap("shop/orders", None, 2, Gap(10, 20, Reason.DAMAGED))

    expected = {"topic": "shop/orders", "partition": 2, "start": 10, "stop": 20, "reason": "damaged"}
    assert lost.value.detail == expected


def test_each_append_that_fails_gets_a_copy_of_the_failure_with_its_detail() -> None:
    failure = Moved("elsewhere", shard="shop/orders[0]", holder="d1")
    tickets = [Ticket(), Ticket()]
    for ticket in tickets:
        ticket.finish(failure)

    raised = []
    for ticket in tickets:
        with pytest.raises(Moved) as caught:
            ticket.result()
        raised.append(caught.value)

    assert [error.detail for error in raised] == [failure.detail] * 2
    assert len({id(error) for error in (*raised, failure)}) == 3


def _error_classes() -> Iterator[type[ForebayError]]:
    for module in pkgutil.walk_packages(forebay.__path__, "forebay."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    pending = [ForebayError]
    while pending:
        kind = pending.pop()
        yield kind
        pending += kind.__subclasses__()


def _keywords(kind: type[ForebayError]) -> list[tuple[str, object]]:
    parameters = inspect.signature(kind).parameters.values()
    return [(each.name, each.default) for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
