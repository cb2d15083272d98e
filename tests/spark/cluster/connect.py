"""A Spark Connect server as a process of its own: a client reaches it through gRPC alone."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tests.spark.cluster.standalone import Daemons
from tests.support.jvm import SOON_UP
from tests.support.ports import free_ports

_SERVER: Final = "org.apache.spark.sql.connect.service.SparkConnectServer"


@contextlib.contextmanager
def connect_server(directory: Path, environment: Mapping[str, str], *, master: str = "local[2]") -> Iterator[str]:
    """The address of a server that runs Spark in itself; ended afterwards, whatever happens."""
    (port,) = free_ports(1)
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": SOON_UP,
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.shuffle.partitions": "2",
    }
    words = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    # The server looks sources up with this Python, whatever its settings say.
    daemons = Daemons(directory, {**environment, "PYSPARK_PYTHON": sys.executable}, memory="768m")
    submit = ["org.apache.spark.deploy.SparkSubmit", "--master", master]
    with daemons.running("connect", [*submit, *words, "--class", _SERVER, "spark-internal"]) as server:
        server.awaited(r"Spark Connect server started at: (\S+)", 1)
        yield f"sc://127.0.0.1:{port}"
