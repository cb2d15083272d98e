"""How long a broker waits for a consumer of a client that says nothing any more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec.inspect
import pytest

import forebay
from forebay.arguments import SESSION_TIMEOUT_MS, SESSION_TIMEOUT_MS_MAX, SESSION_TIMEOUT_MS_MIN
from forebay.clock import SystemClock
from forebay.surface import awaiting, blocking
from forebay.wire.subscriptions import ConsumerPut
from tests.support.brokers import running_broker

WORKER = """
import sys, time
import forebay
log = forebay.connect(sys.argv[1])
consumer = log.topic("shop/orders").subscription("billing").consumer("killed", session_timeout_ms=1500)
print(len(consumer.take(wait_s=30.0)), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_what_a_killed_consumer_held_is_due_when_its_own_session_is_over(tmp_path: Path) -> None:
    with running_broker(tmp_path / "log") as broker, forebay.connect(broker.url) as log:
        topic = log.create_topic("shop/orders")
        topic.append_many([b"a", b"b"])
        subscription = topic.subscribe("billing", mode="shared", start=forebay.EARLIEST)
        clock = SystemClock()
        with subprocess.Popen([sys.executable, "-c", WORKER, broker.url], stdout=subprocess.PIPE, text=True) as worker:
            try:
                assert worker.stdout is not None and worker.stdout.readline() == "2\n"
                with subscription.consumer("next", session_timeout_ms=600) as consumer:
                    # It lives and says so, though it takes nothing: for longer than its session, nothing is due.
                    assert consumer.take(wait_s=3.0) == []
                    killed = clock.monotonic()
                    worker.kill()
                    taken = consumer.take(wait_s=25.0)
                    waited_s = clock.monotonic() - killed
                    assert subscription.consumers() == ["next"]
            finally:
                worker.kill()

        assert [(one.record.offset, one.attempt) for one in taken] == [(0, 2), (1, 2)]
        assert waited_s < SESSION_TIMEOUT_MS / 1000 / 2


@pytest.mark.parametrize("wrong", [0, 99, 3_600_001, 1.5, True, "30 s", None])
def test_a_session_that_no_broker_keeps_is_refused_by_every_log(tmp_path: Path, wrong: Any) -> None:
    with running_broker(tmp_path / "log") as broker, forebay.connect(broker.url) as remote:
        for log in (remote, broker.log()):
            subscription = log.create_topic("shop/orders", exist_ok=True).subscribe("billing")
            with pytest.raises(forebay.Invalid, match="session_timeout_ms is .*; allowed: whole milliseconds, 100 to"):
                subscription.consumer(session_timeout_ms=wrong)
            subscription.consumer(session_timeout_ms=SESSION_TIMEOUT_MS_MAX).close()


def test_every_surface_has_the_same_session_as_the_wire() -> None:
    about: Any = msgspec.inspect.type_info(ConsumerPut)
    (field,) = (field for field in about.fields if field.name == "session_timeout_ms")

    assert field.default == SESSION_TIMEOUT_MS == awaiting.SESSION_TIMEOUT_MS == blocking.SESSION_TIMEOUT_MS
    assert (field.type.ge, field.type.le) == (SESSION_TIMEOUT_MS_MIN, SESSION_TIMEOUT_MS_MAX)
