"""One word for one thing: no public class name stands in two rooms, but for those that docs/words.md lists."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[1]
_SOURCE: Final = _ROOT / "src" / "forebay"
_DIALECT: Final = re.compile(
    r"(?<![a-z])(whoever|nobody|somebody|anybody|anew|holes?|tells?|told|telling|hears?|heard|settles?(?!_ms)|settled|settling"
    r"|let[_ ]go|lets[_ ]go|letting[_ ]go)(?![a-z])",
    re.IGNORECASE,
)
"""Words by themselves, and as parts of a name: `_note_holes`. `settle_ms` is a public name."""


def test_a_public_class_name_stands_in_one_room_or_in_the_list_of_words() -> None:
    """An equality: a name that is mended leaves the list, and none joins it without its reason."""
    rooms: defaultdict[str, set[str]] = defaultdict(set)
    for path in _SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                rooms[node.name].add(path.relative_to(_SOURCE).parts[0].removesuffix(".py"))

    assert {name: found for name, found in rooms.items() if len(found) > 1} == _listed()


def test_a_class_that_tests_share_has_a_name_of_its_own() -> None:
    """What other files of the tests import from a module that is no test means one thing."""
    modules: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted((_ROOT / "tests").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(str(path.relative_to(_ROOT)))
    shared = {name: found for name, found in modules.items() if any("/test_" not in path for path in found)}

    assert {name: found for name, found in shared.items() if len(found) > 1} == {}


def _listed() -> dict[str, set[str]]:
    """The names in the table "One name in two rooms" of docs/words.md, each with its rooms."""
    text = (_ROOT / "docs" / "words.md").read_text()
    section = text.partition("## One name in two rooms\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", rooms)) for name, rooms in rows}


def test_sentences_name_their_actors_and_gaps_are_gaps() -> None:
    """Words of an old dialect, in the source and in the pages of docs.

    What is left: the name that `forebay repair` has always given a step, the method `tell` that every file has, the
    name of a test in a contract suite, which others may have inherited, and the address of a decision.
    """
    pages = [_ROOT / "README.md", _ROOT / "CHANGELOG.md", *sorted((_ROOT / "docs").rglob("*.md"))]
    found = [
        f"{path.relative_to(_ROOT)}: {line.strip()}"
        for path in [*sorted(_SOURCE.rglob("*.py")), *pages]
        for line in path.read_text().splitlines()
        if _DIALECT.search(line) and path.name != "words.md"
    ]

    assert found == [
        "src/forebay/format/parquet/file.py: def tell(self) -> int:",
        "src/forebay/format/parquet/rowgroups.py: def tell(self) -> int:",
        'src/forebay/inspection/steps.py: RECORD = "record anew"',
        "src/forebay/spark/tables/file_writer.py: def tell(self) -> int:",
        "src/forebay/spark/values/avro.py: left = len(value) - stream.tell()",
        "src/forebay/testing/contracts/engines.py: "
        "def test_list_shard_tells_of_shards_and_an_unknown_one_gives_nothing(",
        "docs/cli.md: | the etag in the catalog, while the bytes are sound | the store (`record anew`) |",
        "docs/decisions/README.md: - [0009 The gap of an unclean take-over is in the catalog before the new log begins]"
        "(0009-the-gap-of-a-take-over-is-told-at-once.md)",
    ]
