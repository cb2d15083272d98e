"""How Spark is started in tests: its JVMs, and the Pythons that they start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

ARCHIVE: Final = Path(sys.prefix) / "spark.jsa"
"""The classes of Spark as a JVM keeps them in memory. `tests.support.archive` makes it; a JVM that it does not fit, or
that does not find it, loads them from Spark's archives, which takes more of its start than all else."""
SMALL: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For a JVM that lives for minutes: compiling for a long life took half of its processor time."""
SOON_UP: Final = f'{SMALL} "-XX:SharedArchiveFile={ARCHIVE}" -Xshare:auto -Xlog:cds*=off'
"""The same, for one that runs Spark."""
ENVIRONMENT: Final = {
    "SPARK_SUBMIT_OPTS": SOON_UP,
    "SPARK_LAUNCHER_OPTS": SMALL,
    "PYSPARK_PYTHON": str(Path(__file__).with_name("python")),
    "FOREBAY_TESTS_PYTHON": sys.executable,
}
"""What makes Spark start every driver and worker so, also those of child processes."""
