"""`forebay table`: topics as tables of a lake. Each command has a module of its own."""

from __future__ import annotations

from forebay.cli.commands import group

app = group("table", help="Bring topics into tables, and let tables name their files.")
