"""`forebay pipeline`: pipelines declared in a file, run on Spark."""

from __future__ import annotations

from forebay.cli.commands import group

app = group("pipeline", help="Run pipelines and jobs over topics and their history on Spark.")
