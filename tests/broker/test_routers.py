"""A broker runs the routers of its directory, from its start to its end."""

from __future__ import annotations

from pathlib import Path

import forebay
from forebay.records import EARLIEST
from tests.support.brokers import running_broker, server_settings


def test_a_broker_runs_the_routers_of_its_directory(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log:
        log.create_topic("shop/orders", partitions=2)
        log.create_topic("shop/eu")
        forebay.Routers(log).create("eu", sources=["shop/orders"], destination="shop/eu", tags=["eu"])
    for turn in range(2):
        with running_broker(tmp_path, server_settings()) as broker, forebay.connect(broker.url) as log:
            log.topic("shop/orders").append_many([b"0", b"1"], keys=[b"a", b"b"], tags=["eu", "us"])
            stream = log.topic("shop/eu").follow(EARLIEST, timeout=240)
            assert [next(stream).value for _ in range(turn + 1)] == [b"0"] * (turn + 1)
