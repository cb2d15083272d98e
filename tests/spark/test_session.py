"""A session that is there already is taken as it is; what it lacks is reported once."""

from __future__ import annotations

import logging

import pytest

from forebay.spark.reading.pushing import SETTING
from forebay.spark.start.session import SETTINGS, WANTED, session, warn_once


class _Session:
    """As much of a Spark session as is asked."""

    def __init__(self, conf: dict[str, str]) -> None:
        self.conf = conf


@pytest.mark.parametrize(("off", "effect"), [("spark.python.unix.domain.socket.enabled", "rows reach Spark over TCP")])
def test_running_session_is_taken_and_what_it_lacks_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, off: str, effect: str
) -> None:
    warn_once.cache_clear()
    running = _Session({name: str(name != off).lower() for name in WANTED})
    monkeypatch.setitem(session.__globals__, "running", lambda: running)  # the package has a function of its name

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert session() is running  # type: ignore[comparison-overlap]

    assert [record.getMessage() for record in caplog.records] == [
        f"this Spark session was started without {off}=true: {WANTED[off]}"
    ]
    assert effect in caplog.text


def test_push_down_is_left_as_spark_has_it() -> None:
    """Spark shares the plan of a push-down between the scans of one DataFrame: see `forebay.spark.reading.pushing`."""
    assert SETTING not in SETTINGS
    assert SETTING not in WANTED
