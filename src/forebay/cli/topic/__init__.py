"""`forebay topic`: each command of it has a module of its own."""

from __future__ import annotations

from forebay.cli.commands import group

app = group("topic", help="Create, list, show, alter, copy, seal, move and delete topics.")
