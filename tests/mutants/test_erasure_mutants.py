"""Deliberate breaks of erasing: for each the search by content must find bytes that the answer denies, or a loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

import pytest

from forebay.cleanup.collector import Collector, Scope
from forebay.shard.history import ShardHistory
from forebay.storage.erasure.segments import FoundObject, SegmentErasure
from tests.compacting.directly import compacted
from tests.storage.test_erasing import (
    KEY,
    SECRET,
    TOPIC,
    environment_of,
    filled,
    inside_the_write,
    live,
    others,
    places_of,
)
from tests.support.erased import holders

pytestmark = pytest.mark.slow


def _forgets_what_was_reported(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SegmentErasure, "ended_offsets", lambda erasure: lambda offset: False)


def _sees_only_what_history_names(patch: pytest.MonkeyPatch) -> None:
    whole = SegmentErasure.objects

    def named(erasure: SegmentErasure, *args: object) -> Iterator[FoundObject]:
        return (found for found in whole(erasure, *args) if found.descriptor is not None)  # type: ignore[arg-type]

    patch.setattr(SegmentErasure, "objects", named)


def _leaves_local_files(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShardHistory, "drop_through", lambda history, end: 0)
    patch.setattr(SegmentErasure, "local_files", lambda erasure, sought: [])


def _says_that_objects_were_removed(patch: pytest.MonkeyPatch) -> None:
    def removed(collector: Collector, scope: Scope, keys: Collection[str]) -> list[str]:
        return list(keys)

    patch.setattr(Collector, "remove_at_once", removed)
    _sees_only_what_history_names(patch)


BREAKS: Final[dict[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "files that were reported before are forgotten": _forgets_what_was_reported,
    "objects that history names no more are not searched": _sees_only_what_history_names,
    "local files stay": _leaves_local_files,
    "replaced objects stay": _says_that_objects_were_removed,
}


def _flaws(root: Path, patch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None]) -> list[str]:
    """What is wrong after an erasure, asked twice, and a rewriting inside which records are deleted."""
    environment = environment_of("shared_fs", root)
    flaws: list[str] = []
    with environment.open("one") as log:
        topic = filled(log)
        log.export_topic(TOPIC)
        compacted(environment)
        log.run_retention()
        topic.append(SECRET, key=KEY)
        kept = others(live(topic))
        with patch.context() as inner:
            log.erase_key(TOPIC, KEY)
            broken(inner)
            for _ in range(2):
                asked = log.erase_key(TOPIC, KEY)
                if not places_of(asked, environment) >= holders(SECRET, root):
                    flaws.append("denied")
            gone = kept[0][1]
            gated = inside_the_write(patch, lambda: topic.delete_by_offset(gone, gone + 1, 0))
            with contextlib.suppress(AssertionError), gated:
                rewritten = log.erase_key(TOPIC, KEY, now=True)
            if not places_of(rewritten, environment) >= holders(SECRET, root):
                flaws.append("denied")
            if holders(SECRET, root):
                flaws.append("left")
        if live(topic) != kept[1:]:
            flaws.append("resurrected or lost")
    return flaws


def test_a_sound_erasure_has_no_flaw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _flaws(tmp_path, monkeypatch, lambda patch: None) == []


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_erasure_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _flaws(tmp_path, monkeypatch, BREAKS[name]), name
