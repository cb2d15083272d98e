"""What the documents point to is there: files, headings, and the tests they name as their proof."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import forebay
import forebay.errors
from bench.cases import CASES
from tests.support.tools import tool

_ROOT: Final = Path(__file__).parents[2]
_PAGES: Final = (_ROOT / "README.md", _ROOT / "CHANGELOG.md", *sorted((_ROOT / "docs").rglob("*.md")))
_LINK: Final = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
_TEST: Final = re.compile(r"`(tests/[\w./-]+)(?:::(\w+))?`")
_SITE: Final = (_ROOT / "mkdocs.yml").read_text()
_HEADING: Final = re.compile(r"^#+ (.*)$", re.MULTILINE)


@pytest.mark.parametrize("page", _PAGES, ids=[str(page.relative_to(_ROOT)) for page in _PAGES])
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert list(_broken(page)) == []


@pytest.mark.parametrize("page", _PAGES, ids=[str(page.relative_to(_ROOT)) for page in _PAGES])
def test_tests_that_a_page_names_exist(page: Path) -> None:
    named = _TEST.findall(page.read_text())

    missing = [path for path, _ in named if not (_ROOT / path).exists()]
    unknown = [name for path, name in named if name and f"def {name}(" not in (_ROOT / path).read_text()]

    assert (missing, unknown) == ([], [])


def test_each_need_of_a_server_names_the_tests_that_show_it() -> None:
    page = (_ROOT / "docs" / "development.md").read_text()
    section = page.partition("## What a server needs of the core\n")[2].partition("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| ")][1:]

    assert len(rows) >= 20
    assert [row for row in rows if not any(name for _, name in _TEST.findall(row))] == []


def test_the_page_of_decisions_lists_each_record_by_its_title() -> None:
    records = sorted((_ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    titles = [record.read_text().partition("\n")[0].removeprefix("# ") for record in records]

    listed = re.findall(r"^- \[(.*)\]\((.*)\)$", (_ROOT / "docs" / "decisions" / "README.md").read_text(), re.MULTILINE)

    assert listed == [(title, record.name) for title, record in zip(titles, records, strict=True)]


def test_the_page_on_performance_names_every_case_of_the_bench() -> None:
    named = re.search(r"prints one case:\n(.*?)\.\n", (_ROOT / "docs" / "performance.md").read_text(), re.DOTALL)

    assert named is not None
    assert sorted(re.findall(r"`(\w+)`", named[1])) == sorted(CASES)


def test_the_site_lists_every_page_but_the_single_decisions() -> None:
    listed = re.findall(r"([\w/-]+\.md)$", _SITE.partition("\nnav:\n")[2], re.MULTILINE)
    pages = [page.relative_to(_ROOT / "docs") for page in (_ROOT / "docs").rglob("*.md")]

    assert sorted(listed) == sorted(str(page) for page in pages if not re.match(r"decisions/\d", str(page)))


def test_the_pages_of_the_api_have_every_public_name() -> None:
    text = "".join(page.read_text() for page in (_ROOT / "docs" / "api").glob("*.md"))
    named = set(re.findall(r"^::: forebay\.(\w+)$", text, re.MULTILINE))

    errors = {name for name in forebay.__all__ if hasattr(forebay.errors, name)}
    assert forebay.errors.__name__.removeprefix("forebay.") in named
    assert {name for name in forebay.__all__ if not name.startswith("_")} - errors <= named


def test_the_drawings_are_as_their_tool_makes_them() -> None:
    found = {drawing.name: drawing.read_text() for drawing in (_ROOT / "docs" / "diagrams").glob("*.svg")}

    assert found == tool("diagrams").drawings(), "run tools/diagrams.py"


def test_every_invariant_has_a_proof_and_no_test_proves_what_is_none() -> None:
    proofs = tool("proofs_docs")
    proven, promised = proofs.proofs().keys(), proofs.invariants()

    assert sorted(proven - set(promised)) == []
    assert [name for name in promised if name not in proven] == []


def test_the_map_of_proofs_is_as_its_tool_makes_it() -> None:
    proofs = tool("proofs_docs")

    assert proofs.TARGET.read_text() == proofs.page(), "run tools/proofs_docs.py"


def _broken(page: Path) -> Iterator[str]:
    for path, anchor in _LINK.findall(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield path
        elif anchor and target.suffix == ".md" and anchor not in _anchors(target):
            yield f"{path}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    headings = (heading.lower() for heading in _HEADING.findall(page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in headings}
