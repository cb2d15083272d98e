"""Write the drawings of docs/diagrams from what they say: `python tools/diagrams.py`.

Plain SVG in place of a script that a browser would have to fetch: see docs/decisions/0067.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

TARGET = Path(__file__).parent.parent / "docs" / "diagrams"

STYLE = """\
<style>
svg { background: #ffffff; color: #22303c; font: 14px sans-serif; }
rect { fill: #eaf2f8; stroke: #4a7a9c; } .note { fill: #fdf6e3; stroke: #b58900; } text { fill: #22303c; }
.title { font-weight: bold; } .small { font-size: 12px; } line, path { stroke: #4a7a9c; fill: none; }
.life { stroke-dasharray: 4 4; }
</style>
<defs><marker id="end" markerWidth="10" markerHeight="10" refX="9" refY="4" orient="auto">
<path d="M0,0 L9,4 L0,8"/></marker></defs>
"""
LANE = 210
STEP = 44


@dataclass(frozen=True, kw_only=True)
class Call:
    """One line of a sequence: what `source` does to `target`, or for itself where both are one."""

    source: str
    target: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Box:
    """A named place with what it holds."""

    x: int
    y: int
    title: str
    text: str = ""
    note: bool = False


MOVE = (
    Call(source="operator", target="old owner", text="seal_topic"),
    Call(source="old owner", target="metadata", text="phase: sealing"),
    Call(source="old owner", target="old owner", text="refuse appends, drain, sync"),
    Call(source="old owner", target="store", text="export to the end of the log"),
    Call(source="old owner", target="store", text="check: every object is there"),
    Call(source="old owner", target="metadata", text="phase: sealed, next offset, no owner"),
    Call(source="new owner", target="metadata", text="acquire: epoch + 1, my session"),
    Call(source="new owner", target="new owner", text="begin at exactly that offset"),
    Call(source="new owner", target="store", text="older records are read from history"),
)
LOAD = (
    Call(source="executors", target="store", text="write finished segments"),
    Call(source="executors", target="driver", text="names and hashes"),
    Call(source="driver", target="metadata", text="offer the load"),
    Call(source="owners", target="metadata", text="see the offer"),
    Call(source="owners", target="owners", text="hold appends, export the tail"),
    Call(source="owners", target="metadata", text="attach: descriptors, next offset"),
    Call(source="driver", target="metadata", text="commit, and note the batch"),
    Call(source="readers", target="metadata", text="all rows at once, or none"),
)
TIERS = (
    Box(x=20, y=60, title="caller", text="append"),
    Box(x=190, y=60, title="append queue", text="offset taken"),
    Box(x=360, y=60, title="log", text="write, sync, publish"),
    Box(x=530, y=60, title="sealed files", text="never change"),
    Box(x=700, y=60, title="history", text="objects + catalog"),
    Box(x=360, y=190, title="tail cache", text="newest records"),
    Box(x=530, y=190, title="readers", text="pull by offset", note=True),
    Box(x=700, y=190, title="Spark", text="Arrow, Parquet", note=True),
)
FLOWS = (
    ((150, 90), (190, 90)),
    ((320, 90), (360, 90)),
    ((490, 90), (530, 90)),
    ((660, 90), (700, 90)),
    ((425, 120), (425, 190)),
    ((490, 220), (530, 220)),
    ((595, 120), (595, 190)),
    ((700, 105), (640, 190)),
    ((765, 120), (765, 190)),
)


def sequence(title: str, calls: tuple[Call, ...]) -> str:
    """Lanes from left to right in the order of their first mention, time downwards."""
    lanes = list(dict.fromkeys(name for call in calls for name in (call.source, call.target)))
    height = 90 + STEP * len(calls)
    return drawing(title, LANE * len(lanes), height, [*_lanes(lanes, height), *_calls(lanes, calls)])


def boxes(title: str, places: tuple[Box, ...], flows: tuple[tuple[tuple[int, int], tuple[int, int]], ...]) -> str:
    """Boxes where they are put, and arrows between them."""
    drawn = [part for box in places for part in _box(box)]
    drawn += [_arrow(*start, *stop) for start, stop in flows]
    return drawing(title, max(box.x for box in places) + 150, max(box.y for box in places) + 80, drawn)


def drawing(title: str, width: int, height: int, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
    body = "".join(f"{part}\n" for part in parts)
    return f"{head}<title>{escape(title)}</title>\n{STYLE}{body}</svg>\n"


def _lanes(lanes: list[str], height: int) -> Iterator[str]:
    for number, name in enumerate(lanes):
        x = _middle(number)
        yield f'<rect x="{x - 70}" y="10" width="140" height="32" rx="6"/>'
        yield f'<text class="title" x="{x}" y="31" text-anchor="middle">{escape(name)}</text>'
        yield f'<line class="life" x1="{x}" y1="42" x2="{x}" y2="{height - 10}"/>'


def _calls(lanes: list[str], calls: tuple[Call, ...]) -> Iterator[str]:
    for number, call in enumerate(calls):
        start, stop = _middle(lanes.index(call.source)), _middle(lanes.index(call.target))
        y = 86 + STEP * number
        if start == stop:
            yield f'<text class="small" x="{start + 12}" y="{y - 4}">{escape(call.text)}</text>'
            yield f'<path d="M{start},{y - 14} h8 v14 h-8" marker-end="url(#end)"/>'
        else:
            middle = (start + stop) // 2
            yield f'<text class="small" x="{middle}" y="{y - 6}" text-anchor="middle">{escape(call.text)}</text>'
            yield _arrow(start, y, stop, y)


def _box(box: Box) -> Iterator[str]:
    kind = ' class="note"' if box.note else ""
    yield f'<rect{kind} x="{box.x}" y="{box.y}" width="130" height="60" rx="6"/>'
    yield f'<text class="title" x="{box.x + 65}" y="{box.y + 26}" text-anchor="middle">{escape(box.title)}</text>'
    yield f'<text class="small" x="{box.x + 65}" y="{box.y + 46}" text-anchor="middle">{escape(box.text)}</text>'


def _arrow(x1: int, y1: int, x2: int, y2: int) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" marker-end="url(#end)"/>'


def _middle(number: int) -> int:
    return LANE // 2 + LANE * number


def drawings() -> dict[str, str]:
    """Every drawing by the name of its file."""
    return {
        "tiers.svg": boxes("How a record goes through the tiers", TIERS, FLOWS),
        "move.svg": sequence("A topic moves from one data directory to another", MOVE),
        "load.svg": sequence("A bulk load from Spark", LOAD),
    }


if __name__ == "__main__":
    TARGET.mkdir(exist_ok=True)
    for name, text in drawings().items():
        (TARGET / name).write_text(text, encoding="utf-8")
