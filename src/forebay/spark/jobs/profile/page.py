"""A profile as one page of HTML: tables and plots inside it, nothing fetched from anywhere."""

from __future__ import annotations

import base64
import html
import io
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from forebay.errors import Unsupported
from forebay.spark.jobs.profile.tallies import LATE_SECONDS, Tally, merged
from forebay.spark.jobs.report import Part

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BARS_MAX: Final = 200
NAMES_MAX: Final = 40
TAGS_SHOWN: Final = 20
CALENDAR_MS: Final = (-60_000_000_000_000, 250_000_000_000_000)
_STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1d2733; }
h1 { font-size: 1.5rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #d5dde5; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; display: block; overflow-x: auto; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #e8edf2; white-space: nowrap; }
th { background: #f4f7fa; } td:first-child, th:first-child { text-align: left; }
img { max-width: 100%; } .note { color: #5b6b7b; }
"""
_BLUE: Final = "#2f6db3"


class KeyCounts(NamedTuple):
    """The keys of a topic: how many there are, how many stand once, and the most frequent ones."""

    distinct: int
    once: int
    hot: tuple[tuple[bytes, int], ...]


class TopicPage(NamedTuple):
    """What the page says of one topic: the counts of its partitions, and its keys."""

    topic: str
    tallies: tuple[Tally, ...]
    bucket_ms: int
    keys: KeyCounts


class ReportPage(NamedTuple):
    """All that is shown."""

    topics: tuple[TopicPage, ...]
    parts: tuple[Part, ...]
    made_at: int
    chosen: str = ""
    """Which records and columns were counted, if not all."""


def require_plots() -> None:
    """Raise `Unsupported` where there is no Matplotlib: a job calls it before it counts for hours."""
    try:
        import matplotlib  # noqa: F401 - tried
    except ImportError as error:
        raise Unsupported(
            f'a page with plots needs Matplotlib ({error}): pip install "forebay[plot]", or leave the page out'
        ) from error


def page_of(page: ReportPage) -> str:
    """The page as text."""
    made = f"made {_time(page.made_at)}{html.escape(page.chosen)}"
    body = [f"<h1>Profile of {len(page.topics)} topics</h1><p class=note>{made}</p>"]
    for topic in page.topics:
        parts = [part for part in page.parts if part.topic == topic.topic]
        body.append(f"<h2>{html.escape(topic.topic)}</h2>")
        body.append(_table([part for part in parts if part.partition is not None]))
        body.append(_table([part for part in parts if part.partition is None]))
        body += [_image(name, draw) for name, draw in _plots(topic)]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Profile</title><style>{_STYLE}</style>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _table(parts: Sequence[Part]) -> str:
    names = list(dict.fromkeys(name for part in parts for name in part.figures))
    if not names:
        return ""
    heads = "".join(f"<th>{html.escape(name.replace('_', ' '))}" for name in names)
    rows = [
        f"<tr><td>{'all' if part.partition is None else part.partition}"
        + "".join(f"<td>{_cell(part.figures.get(name))}" for name in names)
        for part in parts
    ]
    return f"<table><tr><th>partition{heads}{''.join(rows)}</table>"


def _cell(figure: object) -> str:
    if figure is None:
        return "–"
    return f"{figure:,}" if isinstance(figure, int | float) else html.escape(str(figure))


def _plots(topic: TopicPage) -> list[tuple[str, Callable[[Axes], None]]]:
    """The plots of a topic, each with what it shows; those that would be empty are left out."""
    whole = merged(topic.tallies)
    if not whole.records:
        return []
    plots: list[tuple[str, Callable[[Axes], None]]] = [
        ("Records per second (UTC)", lambda axes: _rates(axes, whole, topic.bucket_ms, 0)),
    ]
    if whole.key_bytes or whole.value_bytes:
        plots.append(("Bytes per second (UTC)", lambda axes: _rates(axes, whole, topic.bucket_ms, 1)))
        plots.append(("Records by size", lambda axes: _sizes(axes, whole)))
    if len(topic.tallies) > 1:
        shares = [(str(number), tally.records) for number, tally in enumerate(topic.tallies)]
        plots.append(("Records by partition", lambda axes: _bars(axes, shares)))
    if topic.keys.hot:
        hot = [(key.decode(errors="backslashreplace")[:40], count) for key, count in topic.keys.hot]
        plots.append(("Hot keys", lambda axes: _bars(axes, hot, across=True)))
    if whole.tags:
        tags = sorted(whole.tags.items(), key=lambda item: -item[1])[:TAGS_SHOWN]
        plots.append(("Tags", lambda axes: _bars(axes, tags, across=True)))
    if sum(whole.late[1:]):
        names = ["in order", *(f"≤ {_seconds(bound)}" for bound in LATE_SECONDS[1:]), f"> {_seconds(LATE_SECONDS[-1])}"]
        late = list(zip(names, whole.late, strict=True))
        plots.append(("Records by how far behind a newer one they come", lambda axes: _late(axes, late)))
    return plots


def _image(name: str, draw: Callable[[Axes], None]) -> str:
    # Not by pyplot: that would choose a screen, and keep every figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    drawn = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # keys and tags may have characters that no font at hand has
        draw(axes)
        axes.set_title(name, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(drawn, format="png")
    content = base64.b64encode(drawn.getvalue()).decode()
    return f'<p><img alt="{html.escape(name)}" src="data:image/png;base64,{content}"></p>'


def _rates(axes: Axes, tally: Tally, bucket_ms: int, which: int) -> None:
    # No calendar reaches further, and no plot.
    shown = {start: counts for start, counts in tally.times.items() if CALENDAR_MS[0] < start < CALENDAR_MS[1]}
    if not shown:
        return
    first, last = min(shown), max(shown)
    wide = bucket_ms * max(1, -(-(last - first + bucket_ms) // (bucket_ms * BARS_MAX)))
    bars: dict[int, int] = {}
    for start, counts in shown.items():
        place = first + (start - first) // wide * wide
        bars[place] = bars.get(place, 0) + counts[which]
    times = [start / 86_400_000 for start in sorted(bars)]  # days, as matplotlib counts them
    heights = [bars[start] / (wide / 1000) for start in sorted(bars)]
    axes.bar(times, heights, width=wide / 86_400_000, align="edge", color=_BLUE)
    axes.xaxis_date()


def _sizes(axes: Axes, tally: Tally) -> None:
    bits = range(min(tally.sizes), max(tally.sizes) + 1)
    names = ["0" if bit == 0 else f"≤ {_bytes(2**bit)}" for bit in bits]
    _bars(axes, [(name, tally.sizes.get(bit, 0)) for name, bit in zip(names, bits, strict=True)])


def _late(axes: Axes, late: Sequence[tuple[str, int]]) -> None:
    _bars(axes, late)
    axes.set_yscale("symlog")


def _bars(axes: Axes, bars: Sequence[tuple[str, int]], *, across: bool = False) -> None:
    # A name with a dollar sign is no formula. More names than find room are left out.
    names = [_printable(name).replace("$", r"\$") if len(bars) <= NAMES_MAX else "" for name, _ in bars]
    counts = [count for _, count in bars]
    places = range(len(bars))
    if across:
        axes.barh(places, counts, color=_BLUE)
        axes.set_yticks(places, names, fontsize=8)
        axes.invert_yaxis()
    else:
        axes.bar(places, counts, color=_BLUE)
        axes.set_xticks(places, names, fontsize=8)


def _printable(name: str) -> str:
    return "".join(character if character.isprintable() else "·" for character in name)


def _bytes(size: int) -> str:
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def _seconds(seconds: int) -> str:
    for unit, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds // unit} {name}"
    return f"{seconds} s"


def _time(timestamp_ms: int) -> str:
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
