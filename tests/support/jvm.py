"""How Spark is started in tests: its JVMs, and the Pythons that they start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

SOON_UP: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For a JVM that lives for minutes: compiling for a long life took half of its processor time."""
ENVIRONMENT: Final = {
    "SPARK_SUBMIT_OPTS": SOON_UP,
    "SPARK_LAUNCHER_OPTS": SOON_UP,
    "PYSPARK_PYTHON": str(Path(__file__).with_name("python")),
    "FOREBAY_TESTS_PYTHON": sys.executable,
}
"""What makes Spark start every driver and worker so, also those of child processes."""
