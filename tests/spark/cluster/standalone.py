"""A real Spark cluster on this machine: a master and workers as processes of their own, on ports that are free."""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pyspark

from forebay.spark.java import find_java

START_SECONDS: Final = 90
_HOME: Final = Path(pyspark.__file__).parent
_LAUNCHER: Final = _HOME / "bin" / "spark-class"
_QUIET: Final = "-Dspark.master.rest.enabled=false -Dspark.ui.enabled=false -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


@contextlib.contextmanager
def cluster(directory: Path, environment: Mapping[str, str], *, workers: int = 2, cores: int = 1) -> Iterator[str]:
    """The address of a master with so many workers; all are ended afterwards, whatever happens."""
    around = _environment(environment)
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(_daemon(directory, around, "master", "org.apache.spark.deploy.master.Master"))
        (address,) = _awaited(master, r"Starting Spark master at (spark://\S+)", 1)
        for number in range(workers):
            words = ("--cores", str(cores), "--memory", "1g", "--work-dir", str(directory / f"work-{number}"), address)
            worker = f"worker-{number}"
            stack.enter_context(_daemon(directory, around, worker, "org.apache.spark.deploy.worker.Worker", *words))
        _awaited(master, r"Registering worker (\S+)", workers)
        yield address


class _Running:
    """A daemon, and what it has said."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process = process
        self.output = output


@contextlib.contextmanager
def _daemon(directory: Path, around: Mapping[str, str], name: str, program: str, *words: str) -> Iterator[_Running]:
    output = directory / f"{name}.txt"
    command = [str(_LAUNCHER), program, "--host", "127.0.0.1", "--port", "0", "--webui-port", "0", *words]
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=directory, env=dict(around))
    try:
        yield _Running(process, output)
    finally:
        process.kill()
        process.wait()


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    java = {"JAVA_HOME": str(find_java(given)), "SPARK_DAEMON_JAVA_OPTS": _QUIET, "SPARK_DAEMON_MEMORY": "256m"}
    # Else a daemon takes the settings of another Spark on this machine.
    return {**given, **java, "SPARK_HOME": str(_HOME), "SPARK_CONF_DIR": "none", "SPARK_LOCAL_IP": "127.0.0.1"}


def _awaited(daemon: _Running, pattern: str, count: int) -> list[str]:
    """So many finds of the pattern in what the daemon says."""
    pause = threading.Event()
    for _ in range(START_SECONDS * 10):
        found = re.findall(pattern, daemon.output.read_text(errors="replace"))
        if len(found) >= count:
            return found
        assert daemon.process.poll() is None, daemon.output.read_text(errors="replace")
        pause.wait(0.1)
    raise AssertionError(f"no {pattern!r} after {START_SECONDS} s: {daemon.output.read_text(errors='replace')}")
