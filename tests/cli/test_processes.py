"""The command as a process: how fast it answers, signals, pipes, and a directory left by a killed one."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import forebay
from tests.cli.rig import COMMAND, Shell, filled

pytestmark = pytest.mark.slow

LOADED = """
import sys
from forebay.cli import main
main(["--version"])
heavy = {"numpy", "pyarrow", "pyspark", "rich", "typer", "msgspec", "sqlite3", "forebay.storage"}
print(sorted(heavy & set(sys.modules)))
"""


@contextmanager
def _started(*words: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    with subprocess.Popen([*COMMAND, *words], stdin=pipe, stdout=pipe, stderr=pipe, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_version_is_said_without_loading_anything_heavy() -> None:
    begun = time.perf_counter()
    version = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    took = time.perf_counter() - begun
    loaded = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)

    sys.stdout.write(f"forebay --version took {took:.3f} s\n")
    assert version.stdout == f"forebay {forebay.__version__}\n"
    assert loaded.stdout.splitlines()[-1] == "[]"


def test_progress_is_shown_on_a_terminal_and_nowhere_else(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    words = [*COMMAND, "verify", "--data", str(shell.directory)]
    ours, theirs = pty.openpty()

    with os.fdopen(ours, "rb", buffering=0) as terminal:
        shown = subprocess.run(words, stdout=subprocess.PIPE, stderr=theirs, check=True)
        os.close(theirs)
        drawn = terminal.read(65536)
    piped = subprocess.run(words, capture_output=True, check=True)

    assert b"verify" in drawn and b"\x1b[" in drawn
    assert piped.stderr == b"" and piped.stdout == shown.stdout


def test_ctrl_c_ends_following_in_order(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log", rotations=0, records=3)

    with _started(
        "consume", "shop/orders", "--follow", "--from", "earliest", "--data", str(shell.directory)
    ) as follower:
        assert follower.stdout is not None and follower.stderr is not None
        lines = [follower.stdout.readline() for _ in range(3)]
        follower.send_signal(signal.SIGINT)
        code = follower.wait(timeout=30)
        said = follower.stderr.read()

    assert lines == [b"0-0\n", b"0-1\n", b"0-2\n"]
    assert code == 130 and said == b""


def test_following_sees_what_another_process_appends(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log", rotations=0, records=1)
    words = ["consume", "shop/orders", "--follow", "--from", "earliest", "--count", "3"]

    with _started(*words, "--data", str(shell.directory)) as follower:
        assert follower.stdout is not None
        first = follower.stdout.readline()
        shell.ok("produce", "shop/orders", stdin=b"new\n")
        with forebay.open(str(shell.directory)) as log:
            log.topic("shop/orders").append(b"newer")
            rest = follower.stdout.read()
        code = follower.wait(timeout=30)

    assert (first, rest, code) == (b"0-0\n", b"new\nnewer\n", 0)


def test_signals_end_producing_in_order_and_everything_is_counted(tmp_path: Path) -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        directory = tmp_path / str(code)
        shell = Shell(directory)
        shell.ok("topic", "create", "t")

        with _started("produce", "t", "--data", str(directory)) as producer:
            assert producer.stdin is not None and producer.stderr is not None
            producer.stdin.write(b"one\ntwo\n")
            producer.stdin.flush()
            with forebay.open(str(directory), read_only=True) as log:
                follower = log.topic("t").follow(forebay.EARLIEST, timeout=30)
                seen = [next(follower).value, next(follower).value]
            producer.send_signal(number)
            said = producer.stderr.read()
            ended = producer.wait(timeout=30)

        shown = shell.ok("topic", "show", "t", "--json").items[0]["shards"][0]
        assert seen == [b"one", b"two"] and ended == code
        assert b"2 records" in said and b"Traceback" not in said
        assert "clean stop" in shown["recovery"]


def test_a_reader_that_goes_away_is_no_error_to_speak_of(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log", rotations=0, records=30_000)

    for output in ("value", "json"):
        words = ["consume", "shop/orders", "--format", output, "--data", str(shell.directory)]
        with _started(*words) as consumer:
            assert consumer.stdout is not None and consumer.stderr is not None
            consumer.stdout.readline()
            consumer.stdout.close()
            said = consumer.stderr.read()
            code = consumer.wait(timeout=30)

        assert code == 141 and said == b""


def test_a_slow_pipe_is_not_held_up(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "log")
    shell.ok("topic", "create", "t")

    with (
        _started("produce", "t", "--data", str(shell.directory)) as producer,
        _started("consume", "t", "--follow", "--from", "earliest", "--data", str(shell.directory)) as consumer,
    ):
        assert producer.stdin is not None and consumer.stdout is not None
        for word in (b"one\n", b"two\n", b"three\n"):
            producer.stdin.write(word)
            producer.stdin.flush()
            assert consumer.stdout.readline() == word
        producer.stdin.close()
        assert producer.wait(timeout=30) == 0


def test_a_directory_left_by_a_killed_process_is_sound(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "log")
    shell.ok("topic", "create", "t", "--durability", "disk")
    words = ["produce", "t", "--data", str(shell.directory), "--set", "wal.rotate_bytes_max=65536"]

    with _started(*words) as producer:
        assert producer.stdin is not None
        os.set_blocking(producer.stdin.fileno(), True)
        for number in range(20_000):
            producer.stdin.write(b"%d\n" % number)
        producer.stdin.flush()
        with forebay.open(str(shell.directory), read_only=True) as log:
            follower = log.topic("t").follow(forebay.EARLIEST, timeout=30)
            acknowledged = [next(follower) for _ in range(1000)][-1].offset
        producer.kill()
        producer.wait(timeout=30)

    verified = shell.run("verify", "--json")
    values = [int(line) for line in shell.ok("consume", "t").out.split()]
    assert verified.code == 0, verified.out
    assert values == list(range(len(values))) and len(values) > acknowledged
    assert shell.ok("produce", "t", stdin=b"after\n").code == 0
    assert shell.run("verify").code == 0
