"""Log lines for people and for programs. A line about a shard says which: topic, partition, epoch, offset, segment.

The rooms below pass their own objects as arguments of a log call; the fields are read off them here.
"""

from __future__ import annotations

import enum
import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final

_LOGGERS: Final = ("forebay", "httpx", "httpcore", "uvicorn")
"""Ours, those of the library that says one line per request to etcd, and those of the library below a server."""
_AUDIT: Final = "forebay.audit"
"""The logger of changes and refusals of a server."""
_FIELDS: Final = ("topic", "partition", "epoch", "offset", "segment")
_NUMBER: Final = re.compile(r"\b(epoch|offset) (\d+)")
_SHARD: Final = re.compile(r"^([\w.-]+/[\w.-]+)\[(\d+)\]$")
_DIRECTORY: Final = re.compile(r"\b([0-9a-f]{32})_(\d+)/")
_SEGMENT: Final = re.compile(r"(\d{20}-\d{8,10})\.(?:seg|idx)")


class LogFormat(enum.StrEnum):
    """How log lines are written."""

    TEXT = "text"
    JSON = "json"


def shard_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Which shard a log line is about, as far as the line knows."""
    found: dict[str, Any] = {}
    arguments = record.args if isinstance(record.args, tuple) else ()
    for argument in arguments:
        shard = _SHARD.match(str(argument)) if not isinstance(argument, int | float) else None
        if shard is not None:
            found |= {"topic": shard[1], "partition": int(shard[2])}
            epoch = getattr(argument, "epoch", None)
            if isinstance(epoch, int):
                found["epoch"] = epoch
    message = record.getMessage()
    for name, number in _NUMBER.findall(message):
        found.setdefault(name, int(number))
    directory = _DIRECTORY.search(message)
    if directory is not None:
        found = {"topic_id": directory[1], "partition": int(directory[2])} | found
    segment = _SEGMENT.search(message)
    if segment is not None:
        found["segment"] = segment[1]
    return found | {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **shard_fields(record),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, message."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{_time(record)} {record.levelname.lower()}: {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@contextmanager
def logging_to_stderr(log_format: LogFormat, *, verbose: bool) -> Iterator[None]:
    """Within the block log lines go to stderr: warnings, and with `verbose` what is done, each request included.

    The audit log of a server is always written.
    """
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else TextFormatter())
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(output)
        logger.setLevel(logging.INFO if verbose else logging.WARNING)
        logger.propagate = False
    audit = logging.getLogger(_AUDIT)
    audit_level = audit.level
    audit.setLevel(logging.INFO)
    try:
        yield
    finally:
        audit.setLevel(audit_level)
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(output)
            logger.setLevel(level)
            logger.propagate = propagate
