"""An owner is killed with records that only its disk has, and history lies in a real S3 server: loss needs a yes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forebay import Moved, Unavailable
from forebay.records import Gap, Reason
from forebay.settings import ExportSettings
from tests.history.test_servers_killed import Bucket
from tests.moves.conftest import WITH_SERVERS
from tests.support.environments import directories
from tests.support.environments.directories import TOPIC, Environment, numbers, state_of, told
from tests.support.processes import hear

pytestmark = [*WITH_SERVERS, pytest.mark.proves("I41")]

ROOT = Path(__file__).parents[2]


def _environment(root: Path, endpoint: str) -> Environment:
    """Two directories with history in the server; nothing is exported unless it is asked for."""
    return directories.object_store(
        root, endpoint, root.name, export=ExportSettings(interval_s=600, at_close_seconds_max=0)
    )


def main(root: str, endpoint: str) -> None:
    """The owner: ten records are acknowledged, four of them exported; then it waits to be killed."""
    log = _environment(Path(root), endpoint).open("A")
    topic = log.create_topic(TOPIC, durability="fsync")
    topic.append_many([b"%d" % number for number in range(4)])
    log.export_topic(TOPIC)
    topic.append_many([b"%d" % number for number in range(4, 10)])
    sys.stdout.write("acknowledged\n")
    sys.stdout.flush()
    signal.pause()


def _kill_owner(root: Path, bucket: Bucket) -> None:
    command = [sys.executable, "-m", "tests.moves.test_owner_killed", str(root), bucket.endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ) as owner:
        assert hear(owner) == "acknowledged"
        owner.kill()
        owner.wait()


def test_what_a_killed_owner_has_not_exported_is_no_gap_before_an_operator_accepts_the_loss(
    bucket: Bucket, tmp_path: Path
) -> None:
    _kill_owner(tmp_path, bucket)
    environment = _environment(tmp_path, bucket.endpoint)

    with environment.open("B") as b:
        topic = b.topic(TOPIC)
        for _ in range(2):
            with pytest.raises(Unavailable, match=r"waits for directory .*A .*\[4, "):
                topic.append(b"lost?")
        assert told(topic.read()) == numbers(0, 4), "history is read on, and no gap stands in it"

        # The owner is back with all of its files, goes on, and ends without exporting anything.
        with environment.open("A") as a:
            assert told(a.topic(TOPIC).read()) == numbers(0, 10)
            assert a.topic(TOPIC).append(b"10") == 10
        with pytest.raises(Unavailable, match=r"\[4, 11\)"):
            topic.append(b"lost?")

        [loss] = b.take_over(TOPIC, 0, accept_loss=True, by="anna@north").losses
        assert (loss.start, loss.stop, loss.by) == (4, 11, "anna@north")
        gaps: list[Gap] = []
        assert topic.append(b"on") == 11
        assert told(topic.read(on_gap=lambda _, gap: gaps.append(gap))) == [*numbers(0, 4), (11, b"on")]
        assert gaps == [Gap(4, 11, Reason.LOST)]
        assert state_of(b, topic).losses == (loss,)
        with environment.open("A") as a, pytest.raises(Moved):
            a.topic(TOPIC).append(b"late")


if __name__ == "__main__":
    main(*sys.argv[1:])
