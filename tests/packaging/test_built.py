"""Wheel and sdist are built from this checkout, say the same, and work where nothing else of it is."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Final

import pytest

import forebay
from tests.packaging.declared import EXTRAS, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("packaging"), pytest.mark.timeout(600)]

_TRY: Final = """\
import importlib.metadata, pathlib, sys
import forebay, pyspark_forebay

home = pathlib.Path(sys.prefix)
for package in (forebay, pyspark_forebay):
    where = pathlib.Path(package.__file__)
    assert where.is_relative_to(home), where
    assert (where.parent / "py.typed").exists()
with forebay.open(str(home / "data")) as log:
    log.create_topic("shop/orders").append(b"paid")
    assert [record.value for record in log.topic("shop/orders").read()] == [b"paid"]
[found] = [dist for dist in importlib.metadata.distributions(path=[str(where.parents[1])]) if dist.name == "forebay"]
assert found.version == forebay.__version__
print("\\n".join(found.metadata.get_all("Provides-Extra")))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with wheel and sdist, built with the tools of this environment and without a network."""
    target = tmp_path_factory.mktemp("built")
    _run([sys.executable, "-m", "hatchling", "build", "-d", str(target)], cwd=ROOT)
    return target


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel, and the libraries of this one behind it."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    _run([sys.executable, "-m", "venv", "--without-pip", str(home)], cwd=built)
    python = home / "bin" / "python"
    [wheel] = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    _run([*pip, "--disable-pip-version-check", str(wheel)], cwd=built)
    # By a file of paths: files of paths that lie in those directories, such as that of a checkout, are not read.
    libraries = [path for path in sys.path if Path(path).name == "site-packages"]
    [packages] = (home / "lib").glob("python*/site-packages")
    (packages / "libraries.pth").write_text("".join(f"{path}\n" for path in libraries))
    return python


def test_the_wheel_works_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    said = _run([str(installed), "-I", "-c", _TRY], cwd=tmp_path)

    assert sorted(said.split()) == sorted(EXTRAS)


@pytest.mark.parametrize("words", [["-m", "forebay"], ["-m", "forebay.cli"]])
def test_the_package_runs_as_a_command(installed: Path, tmp_path: Path, words: list[str]) -> None:
    assert _run([str(installed), "-I", *words, "--version"], cwd=tmp_path) == f"forebay {forebay.__version__}\n"


def test_the_command_is_installed(installed: Path, tmp_path: Path) -> None:
    assert _run([str(installed.with_name("forebay")), "--version"], cwd=tmp_path) == f"forebay {forebay.__version__}\n"


def test_the_wheel_has_every_module_and_nothing_else(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    sources = [path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts]

    assert sorted(name for name in names if ".dist-info/" not in name) == sorted(
        str(path.relative_to(ROOT / "src")) for path in sources
    )


def test_the_sdist_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    [sdist], [wheel] = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    [unpacked] = tmp_path.iterdir()
    _run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=unpacked)

    [again] = tmp_path.glob("*.whl")
    assert _contents(again) == _contents(wheel)
    shutil.rmtree(unpacked)


def _contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _run(command: list[str], cwd: Path) -> str:
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
