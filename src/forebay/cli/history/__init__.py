"""`forebay history`: jobs on Spark over the history of topics. Each command has a module of its own."""

from __future__ import annotations

from forebay.cli.commands import group

app = group("history", help="Compact, scrub, reindex, migrate, fill and profile the history of topics, on Spark.")
