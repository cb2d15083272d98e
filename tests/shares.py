"""Which tests of a run a worker gets together: those of a file, and of files that use the same costly thing.

A file's fixtures are then made once in a run, and so are Spark's JVM, the etcd cluster and the object servers. xdist
has groups for this by itself, but carries them in the ids of tests, which pytest 9.2 does not let it change.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from xdist.scheduler import LoadScopeScheduling

_ROOT: Final = Path(__file__).parents[1]
_ALL_SLOW: Final = re.compile(r"^pytestmark = .*\bmark\.(?:slow|spark)\b", re.MULTILINE)
_GROUP: Final = re.compile(r'xdist_group\("([\w-]+)"\)')


class SharesScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives each worker one share after the other, in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return share_of(nodeid)


def share_of(nodeid: str) -> str:
    """The share of a test: the group that its file or the conftest beside that names, `spark`, or its file.

    A file with tests of Spark that needs nothing of the one session of a run names a group of its own.
    """
    return _share(nodeid.partition("::")[0])


@cache
def _share(path: str) -> str:
    file = _ROOT / path
    text = file.read_text()
    beside = file.with_name("conftest.py")
    if file.parent != _ROOT / "tests" and beside.exists():
        text += beside.read_text()
    named = _GROUP.search(text)
    if named:
        return named[1]
    return "spark" if "mark.spark" in text else path


def is_all_slow(file: Path) -> bool:
    """Whether a file marks all its tests as slow or of Spark: a run without those need not even import it."""
    return bool(_ALL_SLOW.search(file.read_text()))


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests in the order in which workers get their shares: Spark's session, those with slow tests, the others.

    What takes long does not begin when all else has ended, and the end of the run is made of small shares.
    """
    slow = {share_of(item.nodeid) for item in items if item.get_closest_marker("slow")}
    return sorted(items, key=lambda item: _place(share_of(item.nodeid), slow))


def _place(share: str, slow: set[str]) -> int:
    return 0 if share == "spark" else 1 if share in slow else 2
