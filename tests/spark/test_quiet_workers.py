"""A worker that Spark has no more use for ends without a traceback; one that fails says why."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from forebay.spark.start.quiet import quieten
from tests.support.waiting import PATIENCE, until

WORKER: Final = """
import {module}

def main(infile, outfile):
    if infile.read() == b"!":
        raise RuntimeError("a failure that must be seen")
    outfile.write(b"more rows than are wanted")
"""
"""What the daemon runs in a worker: at the end of its connection it fails, or goes on to write."""


@pytest.fixture
def directory() -> Iterator[Path]:
    """One with a short path: a socket has no other."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def printed(directory: Path, module: str, said: bytes) -> str:
    """What Spark's own daemon prints about a worker that has imported this, when its connection was closed."""
    (directory / "pyspark_probe.py").write_text(WORKER.format(module=module))
    environment = {
        **os.environ,
        "PYTHONPATH": str(directory),
        "PYTHON_UNIX_DOMAIN_ENABLED": "true",
        "PYTHON_WORKER_FACTORY_SOCK_DIR": str(directory),
        "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",
        "SPARK_REUSE_WORKER": "1",
    }
    command = [sys.executable, "-m", "pyspark.daemon", "pyspark_probe"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe) as daemon:
        assert daemon.stdout is not None
        address = daemon.stdout.read(*struct.unpack("!i", daemon.stdout.read(4)))
        with socket.socket(socket.AF_UNIX) as spark:
            spark.connect(address)
            worker = struct.unpack("!i", spark.recv(4, socket.MSG_WAITALL))[0]
            spark.sendall(said)
        until(lambda: not Path(f"/proc/{worker}").exists())
        _, stderr = daemon.communicate(timeout=PATIENCE)
    return stderr.decode()


def test_a_worker_of_forebay_says_nothing_about_a_connection_that_spark_has_closed(directory: Path) -> None:
    assert printed(directory, "forebay.spark", b".") == ""


def test_a_worker_of_another_program_is_left_as_spark_has_it(directory: Path) -> None:
    assert "BrokenPipeError" in printed(directory, "forebay", b".")


def test_a_worker_of_forebay_that_fails_says_why(directory: Path) -> None:
    assert "RuntimeError: a failure that must be seen" in printed(directory, "forebay.spark", b"!")


def test_a_process_that_is_no_daemon_is_left_alone() -> None:
    quieten(sys.modules["__main__"])

    assert getattr(sys.modules["__main__"], "traceback", traceback) is traceback


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_queries_and_the_demo_leave_no_traceback_on_the_terminal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.spark.quiet_child", str(tmp_path)]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)

    assert ended.stdout.splitlines()[-1:] == ["done"], ended.stderr
    assert "daemon.py" not in ended.stderr
