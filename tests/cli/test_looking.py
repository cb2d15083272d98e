"""No command that only looks acquires a topic which another directory holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from tests.cli.rig import Outcome, Shell
from tests.looking import EXPORTED, GROUP, TOPIC, UNUSED, VALUES, begin_owner, end_owner, recorded, settings_of, shared

LOOKS = [
    f"topic show {TOPIC}",
    f"topic show {UNUSED}",
    "topic list",
    f"consume {TOPIC}",
    f"consume {UNUSED}",
    f"consume {TOPIC} --from latest --follow --timeout 0",
    f"records get {TOPIC} --key k",
    f"records get {TOPIC} --tag t",
    f"records get {TOPIC} --at-time 0ms",
    "group list",
    f"group show {GROUP}",
    f"group reset {GROUP} {TOPIC} --to earliest",
    "du",
    "verify",
    "dump",
    "doctor",
]


@pytest.fixture(scope="module", params=["wait", "die"], ids=["owner alive", "owner killed"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where an owner holds a topic in directory `a`, or has left it there; `b` shares metadata and history."""
    root = tmp_path_factory.mktemp("root")
    owner = begin_owner(root, request.param)
    forebay.open(root / "b", settings_of(root)).close()
    # JSON is YAML.
    (root / "settings.yaml").write_text(json.dumps(shared(root)))
    yield root
    end_owner(owner)


def run(root: Path, words: str) -> Outcome:
    return Shell(root / "b").run(*words.split(), "--settings", str(root / "settings.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("words", LOOKS)
def test_a_command_that_looks_changes_no_epoch_and_no_state(root: Path, words: str) -> None:
    before = recorded(root), recorded(root, UNUSED)

    outcome = run(root, words)

    assert outcome.code in (0, 1), outcome.err
    assert (recorded(root), recorded(root, UNUSED)) == before


def test_the_command_line_shows_what_history_has(root: Path) -> None:
    assert run(root, f"consume {TOPIC}").raw.splitlines() == VALUES[:EXPORTED]
    lag = run(root, f"group show {GROUP} --json").items[0]
    assert (lag["end"], lag["lag"] >= 0) == (EXPORTED, True)


def test_a_group_is_shown_with_the_topic_that_lives_in_the_memory_of_another(tmp_path: Path) -> None:
    forebay.open(tmp_path / "b", settings_of(tmp_path)).close()
    (tmp_path / "settings.yaml").write_text(json.dumps(shared(tmp_path)))
    with forebay.open(tmp_path / "a", settings_of(tmp_path)) as log:
        for name, durability in (("shop/carts", "ephemeral"), (TOPIC, "fsync")):
            log.create_topic(name, durability=durability).append_many([b"0", b"1", b"2"])
            log.group(GROUP).commit(name, 2)
        log.export_topic(TOPIC)

        table, items = run(tmp_path, f"group show {GROUP}"), run(tmp_path, f"group show {GROUP} --json").items

    assert table.code == 0 and "shop/carts[0]: its end is not known here" in table.err
    assert [line.split() for line in table.out.splitlines()[1:]] == [
        ["shop/carts", "0", "2", "?", "?"],
        [TOPIC, "0", "2", "3", "1"],
    ]
    assert [(item["end"], item["lag"], "failure" in item) for item in items] == [(None, None, True), (3, 1, False)]
