"""`forebay top`: what it shows of a broker and of a data directory, on a terminal and to a pipe."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
from pathlib import Path

import pytest

import forebay
from forebay.cli.terminal import drawn
from forebay.cli.top import Look, ShardLook, say_look, screen_of, tables_of
from forebay.records import GroupOffset
from forebay.storage.recorded import RecordedShard
from forebay.topics import TopicName
from tests.cli.rig import COMMAND, one_line
from tests.support.brokers import running_broker
from tests.support.commands import invoke


def _look(at: float, *ends: int, lag: int = 7) -> Look:
    """A look at topics shop/0, shop/1, … of one partition each, with these ends."""
    shards = [ShardLook(f"shop/{number}", 0, end, end, None) for number, end in enumerate(ends)]
    place = GroupOffset(topic="shop/0", partition=0, offset=0, end=lag, note="")
    return Look(at, "somewhere: fine", shards, [("billing", place)], [])


def _lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


@pytest.mark.slow
def test_topics_and_lag_of_a_broker_are_shown_once(tmp_path: Path) -> None:
    with running_broker(tmp_path / "served") as broker:
        with forebay.connect(broker.url) as log:
            orders = log.create_topic("shop/orders", partitions=2)
            orders.append_many([b"1", b"2", b"3"], partition=1)
            log.group("billing").commit("shop/orders", 1, partition=1)

        result = invoke(["top", "--once", "--url", broker.url])
        by_partition = invoke(["top", "--once", "--partitions", "--url", broker.url])

    assert result.exit_code == by_partition.exit_code == 0
    assert result.stdout.startswith(f"{broker.url}: ok, ")
    assert ["shop/orders", "1", "3", "-", "3", "0"] in _lines(result.stdout)
    assert ["billing", "shop/orders", "2", "-"] in _lines(result.stdout)
    assert ["shop/orders[1]", "3", "-", "3", "0"] in _lines(by_partition.stdout)


def test_a_directory_is_looked_at_beside_its_owner(tmp_path: Path) -> None:
    with forebay.open(str(tmp_path / "log"), {"wal": {"free_bytes_min": 0}}) as log:
        log.create_topic("shop/orders", partitions=2).append_many([b"1", b"2", b"3"], partition=0)
        log.create_topic("shop/quick", engine="memory").append(b"1")
        log.group("billing").commit("shop/orders", 1, partition=0)
        log.export_topic("shop/orders")
        log.topic("shop/orders").append(b"4", partition=0)

        result = invoke(["top", "--once", "--data", str(tmp_path / "log")])

    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{tmp_path / 'log'}: open in ")
    assert ["shop/orders", "2", "4", "-", "1", "0"] in _lines(result.stdout)
    assert ["shop/quick", "1", "?", "-", "-", "0"] in _lines(result.stdout), "not to be seen from here, and no failure"
    assert ["billing", "shop/orders", "3", "-"] in _lines(result.stdout)


def test_a_partition_of_a_directory_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with forebay.open(str(tmp_path / "log"), {"wal": {"free_bytes_min": 0}}) as log:
        log.create_topic("shop/orders").append(b"1")
    for path in (tmp_path / "log" / "shards").rglob("*.seg"):
        path.write_bytes(b"\xff" * path.stat().st_size)

    result = invoke(["top", "--once", "--data", str(tmp_path / "log")])

    assert result.exit_code == 0, result.stderr
    assert ["shop/orders", "1", "?", "-", "-", "1"] in _lines(result.stdout)
    assert result.stdout.splitlines()[-1].startswith("failed shop/orders[0]: ")


def test_a_topic_that_is_deleted_during_the_look_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with forebay.open(str(tmp_path / "log"), {"wal": {"free_bytes_min": 0}}) as log:
        log.create_topic("shop/gone", partitions=2).append(b"1", partition=0)
        log.create_topic("shop/orders").append(b"1")
        recorded, asked = forebay.Storage.recorded, list[object]()

        def raced(reader: forebay.Storage, name: str | TopicName) -> list[RecordedShard]:
            found = recorded(reader, name)
            if not asked:
                asked.append(name)
                log.delete_topic("shop/gone")
            return found

        monkeypatch.setattr(forebay.Storage, "recorded", raced)
        result = invoke(["top", "--once", "--data", str(tmp_path / "log")])

    assert (result.exit_code, [str(name) for name in asked]) == (0, ["shop/gone"]), result.stderr
    assert ["shop/orders", "1", "1", "-", "1", "0"] in _lines(result.stdout)
    assert "shop/gone" not in result.stdout


def test_rates_are_those_since_the_look_before() -> None:
    topics, groups = tables_of(_look(14.0, 120, 300, lag=5), _look(10.0, 100, 100, lag=7))

    assert topics.rows == [("shop/1", "1", "300", "50.0", "300", "0"), ("shop/0", "1", "120", "5.0", "120", "0")]
    assert groups.rows == [("billing", "shop/0", "5", "-0.5")]


def test_a_topic_that_was_not_seen_before_has_no_rate() -> None:
    topics, _ = tables_of(_look(14.0, 120, 300), _look(10.0, 120))

    assert [row[3] for row in topics.rows] == ["0.0", "0.0"]


@pytest.mark.slow
def test_a_pipe_gets_every_row_by_name(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    look = _look(14.0, *range(200))

    say_look(look._replace(troubles=["degraded shop/lost[3]: no file"]), None)

    lines = capsysbinary.readouterr().out.decode().splitlines()
    names = [line.split()[0] for line in lines if line.startswith("shop/")]
    assert names == sorted(f"shop/{number}" for number in range(200))
    assert lines[-1] == "degraded shop/lost[3]: no file"


def test_a_screen_shows_what_fails_and_changes_most_and_counts_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "20")
    look, before = _look(11.0, *range(100, 200)), _look(10.0, *(99 for _ in range(100)))
    failing = look.shards[3]._replace(failure="the disk is full")
    look = look._replace(
        shards=[*look.shards[:3], failing, *look.shards[4:]], troubles=["failed shop/3[0]: the disk is full"]
    )

    shown = re.sub(r"\x1b\[[0-9;]*m", "", drawn(screen_of(look, before, by_partition=False))).splitlines()

    names = [line.split()[0] for line in shown if line.startswith("shop/")]
    assert len(shown) <= 20
    assert names[:3] == ["shop/3", "shop/99", "shop/98"]
    assert f"… and {100 - len(names)} more" in [line.strip() for line in shown]
    assert shown[-1].strip() == "failed shop/3[0]: the disk is full"


@pytest.mark.slow
def test_a_terminal_is_drawn_again_and_again_until_it_is_interrupted(tmp_path: Path) -> None:
    with forebay.open(str(tmp_path / "log"), {"wal": {"free_bytes_min": 0}}) as log:
        orders = log.create_topic("shop/orders")
        orders.append(b"1")
        ours, theirs = pty.openpty()
        words = [*COMMAND, "top", "--interval", "0.2", "--data", str(tmp_path / "log")]
        environment = {**os.environ, "TERM": "xterm"}
        with (
            os.fdopen(ours, "rb", buffering=0) as terminal,
            subprocess.Popen(words, stdout=theirs, stderr=subprocess.PIPE, env=environment) as child,
        ):
            os.close(theirs)
            seen = _read_until(terminal, b"shop/orders")
            orders.append_many([b"x"] * 776)
            seen += _read_until(terminal, b"777")
            child.send_signal(signal.SIGINT)
            seen += _read_until(terminal, b"\x1b[?1049l")
            code = child.wait(60)

    assert b"\x1b[?1049h" in seen, "it has a screen of its own, and gives it back"
    assert code == 0


def _read_until(terminal: object, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        seen += terminal.read(4096)  # type: ignore[attr-defined]
    return seen


def test_a_directory_that_is_none_is_one_line(tmp_path: Path) -> None:
    result = invoke(["top", "--once", "--data", str(tmp_path / "none")])

    assert result.exit_code != 0
    assert one_line(result.stderr) and "none" in result.stderr


def test_an_interval_of_nothing_is_refused(tmp_path: Path) -> None:
    result = invoke(["top", "--interval", "0", "--data", str(tmp_path)])

    assert result.exit_code == 2
    assert one_line(result.stderr) and "--interval" in result.stderr
