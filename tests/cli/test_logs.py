"""Log lines of the command line: which shard they are about, in both forms."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

import forebay
from forebay.cli.logs import JsonFormatter, LogFormat, TextFormatter, logging_to_stderr, shard_fields
from forebay.shard import NextSource, RecoveryDecision
from forebay.topics import ShardRef, TopicName, TopicSpec
from forebay.wal.writer import ShardPlace
from tests.cli.rig import Shell, filled

_PLACE = ShardPlace("shards/x", "0" * 32, 3, 9, "shop/orders[3]")
_REF = ShardRef(TopicSpec.create(TopicName("shop", "orders"), topic_id="0" * 32, created_at=0), 0)
_DECISION = RecoveryDecision(next_offset=42, source=NextSource.LOCAL, exact=True)


def _record(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("forebay.wal", logging.WARNING, "x.py", 1, message, arguments, None)


@pytest.mark.parametrize(
    ("message", "arguments", "fields"),
    [
        ("%s: log failed at offset %d: %s", (_PLACE, 17, "EIO"), {"partition": 3, "epoch": 9, "offset": 17}),
        ("%s: epoch %d, %s", (_REF, 5, _DECISION), {"partition": 0, "epoch": 5, "offset": 42}),
        (
            "%s: %s is not sealed yet: %s",
            (_PLACE, "shards/x/00000000000000000420-00000007.seg", "EIO"),
            {"partition": 3, "epoch": 9, "segment": "00000000000000000420-00000007"},
        ),
    ],
)
def test_a_line_about_a_shard_says_which(
    message: str, arguments: tuple[object, ...], fields: dict[str, object]
) -> None:
    assert shard_fields(_record(message, *arguments)) == {"topic": "shop/orders", **fields}


def test_a_line_about_a_file_alone_says_whose_it_is() -> None:
    path = f"data/shards/{'ab' * 16}_3/00000000000000000420-00000007.seg"

    fields = shard_fields(_record("%s is not needed any more and could not be removed: %s", path, "EIO"))

    assert fields == {"topic_id": "ab" * 16, "partition": 3, "segment": "00000000000000000420-00000007"}


def test_fields_given_by_name_win() -> None:
    record = _record("moved to offset 3")
    record.offset = 4
    record.topic = "a/b"

    assert shard_fields(record) == {"topic": "a/b", "offset": 4}


def test_a_line_about_nothing_in_particular_has_no_such_fields() -> None:
    assert shard_fields(_record("%d of %s", 3, "four")) == {}


def test_json_lines_hold_everything_on_one_line() -> None:
    record = _record("%s: two\nlines", _PLACE)
    try:
        raise OSError("broken")
    except OSError as error:
        record.exc_info = (OSError, error, error.__traceback__)

    line = JsonFormatter().format(record)

    assert "\n" not in line
    fields = json.loads(line)
    assert fields["level"] == "warning" and fields["logger"] == "forebay.wal"
    assert "OSError: broken" in fields["error"] and fields["time"].endswith("Z")
    assert "broken" in TextFormatter().format(record)


def test_logging_ends_with_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("forebay")
    before = (logger.level, logger.propagate, list(logger.handlers))

    with logging_to_stderr(LogFormat.TEXT, verbose=True):
        logger.info("inside")

    assert (logger.level, logger.propagate, list(logger.handlers)) == before
    assert "info: inside" in capsys.readouterr().err


@pytest.mark.parametrize("verbose", [False, True])
def test_each_request_to_etcd_is_logged_only_if_asked_for(capsys: pytest.CaptureFixture[str], *, verbose: bool) -> None:
    httpx = logging.getLogger("httpx")
    before = (httpx.level, httpx.propagate, list(httpx.handlers))

    with logging_to_stderr(LogFormat.JSON, verbose=verbose):
        httpx.info("HTTP Request: POST http://127.0.0.1:2379/v3/kv/range")
        logging.getLogger("httpcore.connection").warning("broken")

    said = capsys.readouterr().err
    assert ("HTTP Request" in said) is verbose and "broken" in said
    assert (httpx.level, httpx.propagate, list(httpx.handlers)) == before


def test_verbose_json_log_of_a_command(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log", rotations=0, records=20)

    produced = shell.ok("produce", "shop/orders", "-v", "--log-format", "json", stdin=b"x\n")

    lines = [json.loads(line) for line in produced.err.splitlines() if line.startswith("{")]
    (opened,) = [line for line in lines if line.get("topic") == "shop/orders"]
    assert (opened["partition"], opened["epoch"], opened["offset"]) == (0, 2, 20)
    assert not shell.ok("consume", "shop/orders").err


def test_common_options_stand_before_or_behind_the_command(tmp_path: Path) -> None:
    with forebay.open(str(tmp_path / "log")) as log:
        log.create_topic("t")
    shell = Shell(tmp_path / "log")

    before = shell.run("--log-format", "json", "--verbose", "--set", "wal.sync_interval_ms=5", "topic", "list")
    wrong = shell.run("--set", "wal.nonsense=5", "topic", "list")

    assert before.code == 0 and "default/t" in before.out
    assert wrong.code == 2 and "wal.nonsense" in wrong.err
