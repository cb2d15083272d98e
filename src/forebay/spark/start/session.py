"""A Spark session ready for Forebay: Java found or brought, the settings that make the source quick, no noise.

Any other session reads Forebay as well; this one spares looking the settings up.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias

from forebay.errors import Unsupported
from forebay.spark.start.java import find_java

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession


logger = logging.getLogger(__name__)

Session: TypeAlias = "SparkSession"
"""For rooms that pass a session on and know nothing else of Spark."""
QUIET: Final = Path(__file__).with_name("log4j2.properties")
SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "spark.python.unix.domain.socket.enabled": "true",  # rows reach Spark a quarter faster than over TCP
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
REMOTE: Final = "sc://"
"""How the address of a Spark Connect server begins."""
WANTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "spark.python.unix.domain.socket.enabled": "rows reach Spark over TCP, a quarter slower",
    }
)
"""Settings that a session that another program made should have, and what it is like without."""


def session(
    app_name: str = "forebay", *, master: str | None = None, settings: Mapping[str, str] | None = None
) -> SparkSession:
    """The running Spark session, or a new one. `settings` are Spark's own and go before those chosen here.

    Without a `master` it is that of spark-submit, which may have started this program, else all cores of this
    machine. With one that begins with sc:// it is a session of that Spark Connect server, whose own settings cannot
    be chosen from here. Raises `Unavailable` before anything is started if there is no Java to run on.
    """
    found = running()
    if found is not None:
        _warn_of_settings(found)
        return found
    from pyspark.sql import SparkSession

    submitted = _submitted(os.environ)
    chosen = master or submitted.get("spark.master", "local[*]")
    local, remote = chosen.startswith("local"), chosen.startswith(REMOTE)
    if not remote:
        _prepare(os.environ, local=local)
    builder = SparkSession.builder.remote(chosen) if remote else SparkSession.builder.appName(app_name).master(chosen)
    own = {name: value for name, value in SETTINGS.items() if not remote or name.startswith("spark.sql.")}
    own |= LOCAL_SETTINGS if local else {}
    wanted = {name: value for name, value in own.items() if name not in submitted}
    for name, value in {**wanted, **(settings or {})}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def running() -> SparkSession | None:
    """The Spark session of this process, if there is one."""
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise Unsupported(f'Spark is not installed ({error}): pip install "forebay[spark]"') from error
    return SparkSession.getActiveSession()


def context_of(spark: SparkSession) -> SparkContext | None:
    """The Spark context behind a session; `None` for a session of a Spark Connect server, which keeps its own."""
    return getattr(spark, "_sc", None)


def _submitted(environment: Mapping[str, str]) -> dict[str, str]:
    """What spark-submit was given, if it has started this program."""
    if "PYSPARK_GATEWAY_PORT" not in environment:
        return {}
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()  # the JVM is there already: it is asked what it was given
    return dict(SparkConf().getAll())


def _warn_of_settings(found: SparkSession) -> None:
    for name in WANTED:
        if found.conf.get(name, "false") != "true":
            warn_once(name)


@cache
def warn_once(name: str) -> None:
    logger.warning("this Spark session was started without %s=true: %s", name, WANTED[name])


def _prepare(environment: MutableMapping[str, str], *, local: bool) -> None:
    """What Spark's start scripts go by: they see the environment and nothing else."""
    environment["JAVA_HOME"] = str(find_java(environment))
    # Else Spark takes the first python3 of the PATH, which need not be the one that has Forebay.
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    if local:
        environment.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
