"""`forebay pipeline`: pipelines declared in a file, run on Spark."""

from __future__ import annotations

from forebay.cli.commands import group

app = group("pipeline", help="Plan and run pipelines that a file declares, on Spark.")
