"""What a command shows: lines on stdout, questions and progress on stderr where a person is looking."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Protocol

import typer

from forebay.errors import Invalid, Unavailable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_FIGURE: Final = re.compile(r"[0-9][0-9.,]*( [KMGT]?i?B)?|[-?]|")


def say(line: str) -> None:
    """One line on stdout. Names of files may hold anything, so nothing here fails on them."""
    write(line.encode("utf-8", "surrogateescape") + b"\n")


def write(content: bytes) -> None:
    """Bytes on stdout, as they are."""
    with _written():
        sys.stdout.buffer.write(content)


def flush() -> None:
    """When it returns, stdout has everything."""
    with _written():
        sys.stdout.flush()


@contextmanager
def _written() -> Iterator[None]:
    """A failure names stdout, unless its reader went away: that ends a command in silence."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unavailable(f"the output cannot be written: {error.strerror or error}") from error


def say_json(value: object) -> None:
    """One JSON value, on one line."""
    say(as_json(value))


def as_json(value: object) -> str:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


class PagedTable:
    """A table that is shown part by part, as its rows come. The first rows decide how wide the columns are, which are
    at least as wide as `widths` says.

    On a terminal it is drawn to fit; else columns are parted by spaces, and no cell is cut or coloured.
    """

    def __init__(self, *heads: str, widths: Sequence[int] = ()) -> None:
        self._heads = heads
        self._least = widths or [0] * len(heads)
        self._widths: list[int] = []

    def say(self, rows: Sequence[Sequence[object]]) -> None:
        """Show more rows, the first ones below the heads."""
        lines = [list(map(str, row)) for row in rows]
        is_first = not self._widths
        if is_first:
            columns = zip(self._heads, *lines, strict=True)
            self._widths = [max(least, *map(len, column)) for least, column in zip(self._least, columns, strict=True)]
        if draws():
            say(drawn(table_of(self._heads, lines, self._widths, show_heads=is_first)))
            return
        for line in [list(self._heads), *lines] if is_first else lines:
            say("  ".join(cell.ljust(width) for cell, width in zip(line, self._widths, strict=True)).rstrip())


def say_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Rows in columns as wide as they need to be."""
    PagedTable(*heads).say(rows)


def draws() -> bool:
    """Whether stdout is a terminal that can draw."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def drawn(shown: RenderableType) -> str:
    """What rich makes of it on a terminal as wide as this one, without the last end of line."""
    from rich.console import Console

    paper = io.StringIO()
    width = shutil.get_terminal_size().columns
    Console(file=paper, force_terminal=True, width=width, legacy_windows=False).print(shown)
    return paper.getvalue().removesuffix("\n")


def table_of(
    heads: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int] = (), *, show_heads: bool = True
) -> Table:
    """A table for a terminal: figures to the right, long cells folded, nothing in a cell taken for a command."""
    from rich.table import Table
    from rich.text import Text

    # A column that would not fit is folded, never left out.
    fits = bool(widths) and sum(widths) + 2 * len(widths) <= shutil.get_terminal_size().columns
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=show_heads and any(heads)
    )
    for place, head in enumerate(heads):
        is_figure = bool(rows) and all(_FIGURE.fullmatch(row[place]) for row in rows)
        table.add_column(
            Text(head),
            justify="right" if is_figure else "left",
            overflow="fold",
            min_width=widths[place] if fits else None,
        )
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def readable_bytes(count: float) -> str:
    """A size for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def readable_time(timestamp_ms: int) -> str:
    """A timestamp for people, in UTC; the number itself where no calendar reaches."""
    try:
        return (
            datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        )
    except (OverflowError, ValueError, OSError):
        return f"{timestamp_ms}ms"


def confirm(what: str, *, yes: bool) -> None:
    """Return if `what` may be deleted; raises unless the user says so."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise Invalid(f"{what} would be deleted: add --yes to do it")
    typer.confirm(f"Delete {what}?", abort=True, err=True)


class Meter(Protocol):
    """Something that shows how far a command has come."""

    def total(self, amount: int) -> None:
        """How much there is in all."""

    def advance(self, amount: int) -> None:
        """So much more is done."""


class _Silent:
    def total(self, amount: int) -> None:
        pass

    def advance(self, amount: int) -> None:
        pass


@contextmanager
def meter(label: str, *, in_bytes: bool) -> Iterator[Meter]:
    """A progress bar on stderr if that is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield _Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    amount = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=None)

        class _Bar:
            def total(self, amount: int) -> None:
                progress.update(task, total=amount)

            def advance(self, amount: int) -> None:
                progress.advance(task, amount)

        yield _Bar()
