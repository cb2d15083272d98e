"""A client that is newer than its broker: what the broker does not offer is named, with the next step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import forebay
from forebay.broker import health, records, serve, topics
from forebay.cli.app import app
from forebay.spark.place.broker import BrokerPlace
from forebay.spark.place.location import Location
from tests.support.brokers import running_broker

OLD = tuple(route for route in (*topics.ROUTES, *records.ROUTES, *health.ROUTES) if route.method != "PATCH")
"""What a first broker offered: topics and records, and no topic is altered."""


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(serve, "ROUTES", OLD)
    with running_broker(tmp_path / "log") as broker:
        with forebay.connect(broker.url) as log:
            log.create_topic("shop/orders").append(b"a")
        yield broker.url


CALLS: dict[str, Callable[[Any], object]] = {
    "another method": lambda log: log.alter_topic("shop/orders", cap_records=5),
    "loads": lambda log: log.loads_of("shop/orders").page(),
    "a backfill": lambda log: log.loads_of("shop/orders").backfill("b1"),
    "groups": lambda log: log.groups(),
    "routers": lambda log: log.routers.all(),
    "subscriptions": lambda log: log.topic("shop/orders").subscriptions(),
    "a consumer": lambda log: log.topic("shop/orders").subscribe("billing"),
    "dead letters": lambda log: log.topic("shop/orders").dead_letters().letters(),
    "a stream": lambda log: next(log.topic("shop/orders").follow()),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_an_older_broker_does_not_offer_is_named_with_the_next_step(url: str, name: str) -> None:
    """The answer was taken for a topic that is not there."""
    with forebay.connect(url) as log:
        with pytest.raises(forebay.Unsupported) as refused:
            CALLS[name](log)

        assert str(refused.value).startswith(f"the broker at {url} does not offer ")
        assert "/v1/" in str(refused.value) and "upgrade the broker, or use a client of its version" in str(
            refused.value
        )
        assert [record.value for record in log.topic("shop/orders").read()] == [b"a"], "what it offers goes on"
        with pytest.raises(forebay.UnknownTopic):
            log.topic("shop/none").offsets()


def test_a_command_and_spark_say_so_too(url: str) -> None:
    result = CliRunner().invoke(app, ["subscription", "list", "shop/orders", "--url", url])
    assert result.exit_code != 0
    assert f"the broker at {url} does not offer GET /v1/" in result.stderr and "upgrade the broker" in result.stderr

    with (
        closing(BrokerPlace(Location.parse({"broker": url}))) as place,
        pytest.raises(forebay.Unsupported, match="upgrade"),
    ):
        place.view("any", "shop/orders", 0)
