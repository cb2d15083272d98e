"""How the JVMs of tests are started."""

from __future__ import annotations

from typing import Final

SOON_UP: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For a JVM that lives for minutes: compiling for a long life took half of its processor time."""
ENVIRONMENT: Final = {"SPARK_SUBMIT_OPTS": SOON_UP, "SPARK_LAUNCHER_OPTS": SOON_UP}
"""What makes Spark start every driver so, also those of child processes."""
