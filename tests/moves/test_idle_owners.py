"""An owner that no caller uses finds out too that its session is over: it stops, and sets aside what history lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay import Moved
from forebay.storage.background import cleanup
from forebay.testing.inside import inside
from tests.support.environments import directories
from tests.support.environments.directories import TOPIC, clear_up, id_of
from tests.support.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _nobody_looks_but_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an owner may have a new session before the next one comes."""
    monkeypatch.setattr(cleanup, "LOOK_SECONDS", 600.0)


def test_an_overtaken_log_that_no_caller_appends_to_stops_and_sets_its_files_aside(tmp_path: Path) -> None:
    environment = directories.shared_fs(tmp_path)
    with environment.open("A") as a, environment.open("B") as b:
        topic = a.create_topic(TOPIC, durability="fsync", on_owner_loss="take_over")
        topic.append(b"not exported")
        engine = inside(a).engine
        inside(a).lose_session()
        began = b.topic(TOPIC).append(b"b")

        clear_up(a)
        until(lambda: engine.shards() == [])

        def is_clear() -> bool:
            clear_up(a)
            return environment.files("A") == []

        # The thread that gives the shard up may still be inside it: then it is left to the next look.
        until(is_clear)
        assert environment.aside("A") != []
        with pytest.raises(Moved, match=id_of(b)):
            topic.append(b"late")
        assert b.topic(TOPIC).append(b"b") == began + 1


def test_an_overtaken_ephemeral_topic_that_no_caller_appends_to_ends(tmp_path: Path) -> None:
    environment = directories.shared_fs(tmp_path)
    with environment.open("A") as a, environment.open("B") as b:
        topic = a.create_topic(TOPIC, durability="ephemeral")
        topic.append(b"a")
        inside(a).lose_session()
        b.topic(TOPIC).append(b"b")

        clear_up(a)

        assert inside(a).memory.shards() == []
        with pytest.raises(Moved, match=id_of(b)):
            list(topic.read())
