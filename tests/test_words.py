"""One word for one thing: no public class name stands in two rooms, but for those that are listed and wait."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).parents[1] / "src" / "forebay"
TWICE: Final = frozenset(
    [
        "Batch",
        "Bounds",
        "Column",
        "Commit",
        "Commits",
        "Copied",
        "Counters",
        "Cursor",
        "Damage",
        "Database",
        "DeleteRange",
        "Durability",
        "Ended",
        "Entry",
        "Examined",
        "Flaw",
        "Group",
        "Held",
        "History",
        "Holding",
        "Kind",
        "Limits",
        "NewRecord",
        "Outcome",
        "Outlook",
        "Page",
        "Part",
        "Parts",
        "Phase",
        "Piece",
        "Progress",
        "Put",
        "Recorded",
        "Report",
        "Run",
        "Seen",
        "ShardPlace",
        "Source",
        "Span",
        "Staged",
        "Standing",
        "Step",
        "Stream",
        "Stretch",
        "Tally",
        "Target",
        "Told",
        "Verdict",
        "Write",
    ]
)
"""Names that stand in two rooms or more. A name that is mended leaves the list; none joins it."""


def test_no_public_class_name_stands_in_two_rooms() -> None:
    rooms: defaultdict[str, set[str]] = defaultdict(set)
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                rooms[node.name].add(path.relative_to(SOURCE).parts[0])

    assert {name for name, found in rooms.items() if len(found) > 1} - TWICE == set()
