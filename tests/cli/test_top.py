"""`forebay top`: what it shows of a broker."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import forebay
from forebay.cli.app import app
from forebay.cli.options import DIRECTORY_VARIABLE, URL_VARIABLE
from forebay.cli.top import BrokerLook, say_look
from forebay.wire.messages import (
    BrokerStatus,
    DegradedShard,
    ExportItem,
    Health,
    OffsetsItem,
    PartitionItem,
    Ready,
    RecoveryItem,
)
from tests.cli.rig import one_line
from tests.support.brokers import running_broker


def test_topics_and_lag_are_shown_once(tmp_path: Path) -> None:
    with running_broker(tmp_path / "served") as broker:
        with forebay.connect(broker.url) as log:
            orders = log.create_topic("shop/orders")
            orders.append_many([b"1", b"2", b"3"])
            log.group("billing").commit("shop/orders", 1)

        result = CliRunner().invoke(app, ["top", "--once", "--url", broker.url])

    lines = [line.split() for line in result.stdout.splitlines()]
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{broker.url}: ok, ")
    assert ["shop/orders", "1", "-", "0", "0"] in lines
    assert ["billing", "shop/orders", "2"] in lines


def test_a_rate_is_that_since_the_look_before(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    say_look("http://b", _look(14.0, 120), _look(10.0, 100))

    shown = capsysbinary.readouterr().out.decode().splitlines()
    assert ["shop/orders", "1", "5.0", "7", "1"] in [line.split() for line in shown]
    assert shown[-2:] == ["degraded shop/lost[3]: no file", "failed shop/orders[0]: the disk is full"]


def test_a_directory_is_no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)

    result = CliRunner().invoke(app, ["top", "--once"])

    assert result.exit_code == 2
    assert one_line(result.stderr) and "--url" in result.stderr


def _look(at: float, end: int) -> BrokerLook:
    partition = PartitionItem(
        topic="shop/orders",
        partition=0,
        engine="segment",
        durability="disk",
        epoch=1,
        recovery=RecoveryItem(summary="", next_offset=0, source="new", exact=True, clean=True, gaps=[], torn_bytes=0),
        failure="the disk is full",
        offsets=OffsetsItem(partition=0, earliest=0, evict_floor=0, durable=end, exported=0, next=end),
        segments=1,
        cache_bytes=0,
        export=ExportItem(
            exported=0, behind_files=1, behind_records=7, behind_bytes=70, objects=0, bytes=0, errors=0, error=None
        ),
    )
    return BrokerLook(
        at,
        Health(status="degraded", version="1", uptime_s=1.0),
        Ready(ready=True, replay_progress=1.0, degraded=[DegradedShard("shop/lost", 3, "no file")]),
        BrokerStatus(directory_id=None, read_only=False, partitions=[partition], workers=[]),
        [],
    )
