"""`forebay doctor`: it asks the machine and says what it means."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import forebay
from forebay.cli import probes
from forebay.cli.answers import Verdict
from forebay.disk import SystemDisk
from tests.cli.house import House
from tests.cli.rig import Shell, filled, snapshot

pytestmark = pytest.mark.slow


def _answers(shell: Shell, *words: str, code: int = 0) -> dict[str, tuple[str, str]]:
    outcome = shell.run("doctor", "--json", *words)
    assert outcome.code == code, outcome.out
    return {item["check"]: (item["verdict"], item["answer"]) for item in outcome.items}


@pytest.fixture(autouse=True)
def _no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a Java takes longer than all other questions together; one test asks it."""
    monkeypatch.setattr(probes, "java_executable", lambda: None)


def test_every_question_is_answered_and_nothing_is_left_behind(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    before = snapshot(shell.directory)

    answers = _answers(shell)
    text = shell.ok("doctor").out

    asked = {"versions", "packages", "java", "limits", "file system", "space", "disk", "clock", "lock", "directory"}
    assert asked | {"orphans"} == set(answers)
    assert f"forebay {forebay.__version__}" in answers["versions"][1]
    assert "ms" in answers["disk"][1]
    assert answers["lock"][0] == "ok" and "1 topics" in answers["directory"][1]
    assert len(text.splitlines()) == len(answers)
    assert snapshot(shell.directory) == before


def test_what_is_shared_is_tried_and_nothing_is_left_behind(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.ok("a", "topic", "create", "t")
    before = snapshot(tmp_path)

    answers = _answers(Shell(tmp_path / "a"), "--settings", str(house.file))

    assert answers["store"][0] == "ok" and "creating twice was refused" in answers["store"][1]
    assert answers["metadata"][0] == "ok" and "shared.sqlite" in answers["metadata"][1]
    assert snapshot(tmp_path) == before


def test_a_store_that_lets_two_writers_create_the_same_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(tmp_path, "local")
    house.ok("a", "topic", "create", "t")
    # Such a file system replaces what had the name instead of refusing.
    monkeypatch.setattr(SystemDisk, "link", lambda disk, source, target: shutil.copyfile(source, target))

    answers = _answers(Shell(tmp_path / "a"), "--settings", str(house.file), code=1)

    assert answers["store"][0] == "problem" and "a second writer was let" in answers["store"][1]


def test_a_store_that_is_not_mounted_is_named_and_not_made(tmp_path: Path) -> None:
    house = House(tmp_path)

    answers = _answers(Shell(tmp_path / "a"), "--settings", str(house.file))

    assert answers["store"][0] == "warning" and "store.root" in answers["store"][1]
    assert answers["metadata"][0] == "note"
    assert os.listdir(tmp_path) == ["settings.yaml"]


def test_an_etcd_that_does_not_answer_is_a_problem(tmp_path: Path) -> None:
    words = ["metadata.backend=etcd", "metadata.endpoints=http://127.0.0.1:1", "metadata.request_timeout_ms=200"]

    answers = _answers(Shell(tmp_path / "a"), *(word for pair in words for word in ("--set", pair)), code=1)

    assert answers["metadata"][0] == "problem" and "http://127.0.0.1:1" in answers["metadata"][1]


def test_a_directory_that_does_not_exist_is_a_note(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "not" / "yet")

    answers = _answers(shell)

    assert answers["directory"][0] == "note"
    assert not (tmp_path / "not").exists()


def test_an_owner_is_seen(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    with forebay.open(str(shell.directory)):
        answers = _answers(shell)

    assert answers["lock"][0] == "note" and "another process" in answers["lock"][1]


def test_orphans_are_named(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    (shell.directory / "shards" / "0123_0").mkdir()

    answers = _answers(shell)

    assert answers["orphans"][0] == "warning" and "0123_0" in answers["orphans"][1]


def test_a_foreign_directory_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")

    answers = _answers(Shell(tmp_path), code=1)

    assert answers["directory"][0] == "problem"


def test_too_little_space_and_too_few_files_are_problems(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")

    space = _answers(shell, "--set", f"wal.free_bytes_min={2**40}", code=1)
    files = _answers(shell, "--set", "runtime.descriptors_max=1000000", code=1)

    assert space["space"][0] == "problem"
    assert files["limits"][0] == "problem"


def test_a_clock_that_was_never_set_is_a_problem() -> None:
    assert probes._clock(0, None).verdict is Verdict.PROBLEM
    assert probes._clock(2_000_000_000_000, 2_000_000_009_000).verdict is Verdict.WARNING
    assert probes._clock(2_000_000_000_000, 2_000_000_000_001).verdict is Verdict.OK


@pytest.mark.parametrize(("kind", "verdict"), [("ext4", "ok"), ("tmpfs", "warning"), ("nfs4", "warning")])
def test_file_systems_that_do_not_keep_promises(monkeypatch: pytest.MonkeyPatch, kind: str, verdict: str) -> None:
    monkeypatch.setattr(probes, "_mount", lambda place: (kind, "device"))

    assert probes._file_system("/").verdict == verdict


@pytest.mark.parametrize(("script", "verdict"), [("echo 'openjdk version \"21\"' >&2", "ok"), ("exit 3", "warning")])
def test_the_java_that_is_found_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, verdict: str
) -> None:
    java = tmp_path / "java"
    java.write_text(f"#!/bin/sh\n{script}\n")
    java.chmod(0o755)
    monkeypatch.setattr(probes, "java_executable", lambda: str(java))

    answer = probes._java()

    assert answer.verdict == verdict and str(java) in answer.answer
