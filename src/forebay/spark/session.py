"""A Spark session ready for Forebay: Java found or brought, the settings that make the source quick, no noise.

Any other session reads Forebay as well; this one spares looking the settings up.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias

from forebay.errors import Unsupported
from forebay.spark.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Session: TypeAlias = "SparkSession"
"""For rooms that pass a session on and know nothing else of Spark."""
QUIET: Final = Path(__file__).with_name("log4j2.properties")
SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "spark.python.unix.domain.socket.enabled": "true",  # rows reach Spark a quarter faster than over TCP
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": f'"-Dlog4j2.configurationFile={QUIET.as_uri()}"',
    }
)
LOCAL_SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
)
"""A session on this machine alone is not to be reached from another."""


def session(
    app_name: str = "forebay", *, master: str = "local[*]", settings: Mapping[str, str] | None = None
) -> SparkSession:
    """The running Spark session, or a new one. `settings` are Spark's own and go before those chosen here.

    Raises `Unavailable` before anything is started if there is no Java to run on.
    """
    found = running()
    if found is not None:
        return found
    from pyspark.sql import SparkSession

    local = master.startswith("local")
    _prepare(os.environ, local=local)
    builder = SparkSession.builder.appName(app_name).master(master)
    for name, value in {**SETTINGS, **(LOCAL_SETTINGS if local else {}), **(settings or {})}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def running() -> SparkSession | None:
    """The Spark session of this process, if there is one."""
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise Unsupported(f'Spark is not installed ({error}): pip install "forebay[spark]"') from error
    return SparkSession.getActiveSession()


def _prepare(environment: MutableMapping[str, str], *, local: bool) -> None:
    """What Spark's start scripts go by: they see the environment and nothing else."""
    environment["JAVA_HOME"] = str(find_java(environment))
    # Else Spark takes the first python3 of the PATH, which need not be the one that has Forebay.
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    if local:
        environment.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
