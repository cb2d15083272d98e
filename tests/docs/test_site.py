"""The documents build into a site without a warning, and neither the build nor a reader's browser asks another host."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

import pytest

import forebay
import forebay.spark

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site"), pytest.mark.timeout(600)]

_ROOT: Final = Path(__file__).parents[2]
_ALONE: Final = """\
import socket

def refuse(*arguments, **options):
    raise OSError("the build asks another host: " + repr(arguments[1:]))

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse

from mkdocs.__main__ import cli

cli()
"""
_FETCHED: Final = {
    "audio": "src",
    "embed": "src",
    "form": "action",
    "iframe": "src",
    "img": "src",
    "input": "src",
    "link": "href",
    "object": "data",
    "script": "src",
    "source": "src",
    "video": "src",
}
"""What a browser loads of each element by itself; a link that a reader follows is none of it."""
_OUTSIDE: Final = re.compile(r"^\s*(?:[a-z]+:)?//", re.IGNORECASE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without a network."""
    target = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # an advertisement of the theme's makers
    command = [sys.executable, "-c", _ALONE, "build", "--strict", "--site-dir", str(target)]
    ended = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "WARNING" not in ended.stderr and "ERROR" not in ended.stderr, ended.stderr
    return target


def test_every_page_is_in_the_site(site: Path) -> None:
    pages = {page.relative_to(_ROOT / "docs").with_suffix(".html") for page in (_ROOT / "docs").rglob("*.md")}
    wanted = {page.with_name("index.html") if page.name == "README.html" else page for page in pages}

    assert {page.relative_to(site) for page in site.rglob("*.html")} == wanted | {Path("404.html")}


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    found = [f"{page.relative_to(site)}: {what}" for page in site.rglob("*.html") for what in _loaded(page.read_text())]

    assert [what for what in found if _OUTSIDE.match(what.partition(": ")[2])] == []
    assert len(found) > 100, "the pages load what they need from the site itself"


def test_no_style_loads_anything_from_another_host(site: Path) -> None:
    styles = [style.read_text() for style in site.rglob("*.css")]

    assert [
        found for style in styles for found in re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^)]*", style)
    ] == []
    assert styles


def test_no_page_has_what_makes_the_scripts_of_the_theme_ask_another_host(site: Path) -> None:
    """A drawing in Mermaid, and the address of a repository: see decision 0067."""
    text = "".join(page.read_text() for page in site.rglob("*.html"))

    assert re.findall(r'class="[^"]*\bmermaid\b|data-md-component="source"', text) == []


def test_docstrings_are_on_the_pages_of_the_api(site: Path) -> None:
    page = (site / "api" / "log.html").read_text()

    assert "for this process alone" in page, "the docstring of forebay.open"
    assert "append_many_nowait" in page


def test_the_pages_of_the_api_have_fields_types_and_the_names_of_spark(site: Path) -> None:
    """A field may say by its name and type alone what it is."""
    records, log, spark = ((site / "api" / f"{page}.html").read_text() for page in ("records", "log", "spark"))

    for field in (*forebay.Record.__struct_fields__, "offset"):
        assert f'id="forebay.Record.{field}"' in records
    for field in forebay.TopicSpec.__struct_fields__:
        assert f'id="forebay.TopicSpec.{field}"' in log
    signature = re.sub(r"<[^>]+>", "", spark.partition('id="forebay.spark.session"')[2][:10_000])
    assert "Mapping[str, str] | None = None" in html.unescape(signature)
    assert [name for name in forebay.spark.__all__ if f'id="forebay.spark.{name}"' not in spark] == []


class _Resources(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get(_FETCHED.get(tag, ""))
        if address:
            self.found.append(address)


def _loaded(page: str) -> Iterator[str]:
    """The addresses that a browser asks for when it shows a page."""
    resources = _Resources()
    resources.feed(page)
    yield from resources.found
