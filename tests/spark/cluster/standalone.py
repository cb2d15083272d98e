"""A real Spark cluster on this machine: a master and workers as processes of their own, on ports that are free."""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pyspark

from forebay.spark.start.java import find_java
from tests.support.jvm import SOON_UP

START_SECONDS: Final = 300
_HOME: Final = Path(pyspark.__file__).parent
_OPTIONS: Final = f"-Dspark.master.rest.enabled=false -Dspark.ui.enabled=false {SOON_UP}"
_MASTER: Final = "org.apache.spark.deploy.master.Master"
_WORKER: Final = "org.apache.spark.deploy.worker.Worker"
_ANYWHERE: Final = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")


@contextlib.contextmanager
def cluster(directory: Path, environment: Mapping[str, str], *, workers: int = 2) -> Iterator[str]:
    """The address of a master with so many workers of one core; all are ended afterwards, whatever happens."""
    daemons = Daemons(directory, environment)
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(daemons.running("master", [_MASTER, *_ANYWHERE]))
        (address,) = master.awaited(r"Starting Spark master at (spark://\S+)", 1)
        for number in range(workers):
            words = ("--cores", "1", "--memory", "1g", "--work-dir", str(directory / f"work-{number}"), address)
            stack.enter_context(daemons.running(f"worker-{number}", [_WORKER, *_ANYWHERE, *words]))
        master.awaited(r"Registering worker (\S+)", workers)
        yield address


class Daemon:
    """A program of Spark's, and what it has said."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process = process
        self._output = output

    def awaited(self, pattern: str, count: int) -> list[str]:
        """So many finds of the pattern in what it says."""
        pause = threading.Event()
        for _ in range(START_SECONDS * 10):
            said = self._output.read_text(errors="replace")
            found = re.findall(pattern, said)
            if len(found) >= count:
                return found
            assert self._process.poll() is None, said
            pause.wait(0.1)
        raise AssertionError(f"no {pattern!r} after {START_SECONDS} s: {said}")


class Daemons:
    """Programs of Spark's in an environment and a directory of their own."""

    def __init__(self, directory: Path, environment: Mapping[str, str], *, memory: str = "256m") -> None:
        self._directory = directory
        java = {"JAVA_HOME": str(find_java(environment)), "SPARK_DAEMON_JAVA_OPTS": _OPTIONS}
        # A directory without settings: else they take those of another Spark on this machine.
        spark = {"SPARK_HOME": str(_HOME), "SPARK_CONF_DIR": str(_HOME / "conf"), "SPARK_LOCAL_IP": "127.0.0.1"}
        self._environment = {**environment, **java, **spark, "SPARK_DAEMON_MEMORY": memory}

    @contextlib.contextmanager
    def running(self, name: str, words: Sequence[str]) -> Iterator[Daemon]:
        """The program as a process; ended afterwards, whatever happens."""
        output = self._directory / f"{name}.txt"
        command = [str(_HOME / "bin" / "spark-class"), *words]
        with output.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, cwd=self._directory, env=self._environment)
        try:
            yield Daemon(process, output)
        finally:
            process.kill()
            process.wait()
