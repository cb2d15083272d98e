"""Every import is declared, and each extra alone brings what it promises."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pytest

import forebay
from forebay.cli.extras import declared, extra_with
from forebay.errors import Unsupported
from forebay.spark.jobs.profile.page import require_plots
from forebay.spark.values.avro import AvroValues
from tests.packaging.declared import (
    EXTRAS,
    NOT_FOR_USERS,
    OURS,
    PROJECT,
    ROOT,
    closure,
    distributions,
    imports,
    required,
)

_PROMISING: Final = sorted(EXTRAS.keys() - NOT_FOR_USERS - {"all"})
_NEEDED_UNSEEN: Final = {"pandas"}
"""What is declared and not imported: Spark itself asks for pandas where rows come as Arrow."""
_CORE: Final = ["forebay.aio", "forebay.cli.app", "forebay.inspection.calls", "forebay.live", "forebay.service"]
_BLOCKED: Final = """\
import importlib, importlib.abc, json, sys

blocked, modules = json.loads(sys.stdin.read())

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
for name in modules:
    importlib.import_module(name)
"""


@pytest.mark.slow
def test_every_import_is_declared() -> None:
    declared = required() | {name for extra in _PROMISING for name in required(extra)}
    undeclared = {
        f"{module} imports {name}"
        for module, names in imports().items()
        for name in names
        if not distributions().get(name, set()) & declared
    }

    assert undeclared == set()


def test_what_is_declared_is_imported() -> None:
    used = {found for names in imports().values() for name in names for found in distributions().get(name, ())}
    declared = required() | {name for extra in _PROMISING for name in required(extra)}

    assert declared - used == _NEEDED_UNSEEN


def test_all_has_every_extra_but_those_for_tests() -> None:
    assert required("all") == {name for extra in _PROMISING if extra != "testing" for name in required(extra)}


def test_the_page_of_versions_lists_every_extra() -> None:
    page = (ROOT / "docs" / "versions.md").read_text().partition("## What to install\n")[2].partition("\n## ")[0]

    assert sorted(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)) == sorted(EXTRAS.keys() - NOT_FOR_USERS)


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+\w*", forebay.__version__)


@pytest.mark.slow
def test_the_core_needs_no_extra() -> None:
    """The embedded log, its asyncio twin and the command line."""
    public = [name for name in forebay.__all__ if not name.startswith("_")]
    ask = f"import forebay; [getattr(forebay, name) for name in {public!r}]; forebay.open(':memory:').close()"

    _import_alone(None, _CORE, ask)


@pytest.mark.slow
@pytest.mark.parametrize("extra", _PROMISING)
def test_an_extra_alone_imports_what_it_promises(extra: str) -> None:
    """Every module that imports a distribution of the extra, and nothing that the extra and the core do not bring."""
    brought = {module for module, names in distributions().items() if names & required(extra)}
    own = {module for module, names in distributions().items() if names & (required(extra) - required())}
    modules = [name for name, names in imports().items() if names & own and names <= brought]

    assert modules
    foreign = {name for module in modules for name in imports()[module]}
    _import_alone(extra, [*modules, *sorted(foreign)])


def _import_alone(extra: str | None, modules: list[str], code: str = "") -> None:
    """Import modules in a process that has nothing but what the package with an extra brings."""
    ended = _run_alone(extra, [name for name in modules if not name.endswith("__main__")], code)
    assert ended.returncode == 0, ended.stderr


def _run_alone(
    extra: str | None, modules: list[str], code: str, words: Sequence[str] = (), home: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Import modules, then run code, in a process that has nothing but what the package with an extra brings."""
    installed = closure(extra)
    blocked = [module for module, names in distributions().items() if not names & installed and module not in OURS]
    return subprocess.run(
        [sys.executable, "-c", f"{_BLOCKED}\n{code}", *words],
        input=json.dumps([blocked, modules]),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=home,
    )


_COMMAND: Final = """
from forebay.cli import main

assert main(["topic", "create", "shop/orders"]) == 0
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "extra"),
    [
        ("history compact", "spark"),
        ("pipeline plan shop.yml", "spark"),
        ("table register shop/orders", "lake"),
        ("table register shop/orders --table-format delta", "lake"),
        ("serve", "broker"),
        ("topic list --url http://127.0.0.1:1", "client"),
        ("topic create shop/rows --engine rocksdb", "rocksdb"),
    ],
)
def test_a_command_without_its_extra_names_it_in_one_line(words: str, extra: str, tmp_path: Path) -> None:
    (tmp_path / "shop.yml").write_text("name: shop\nsources: [{name: o, topic: shop/orders}]\nsinks: []\n")

    ended = _run_alone(None, [], _COMMAND, words.split(), tmp_path)

    assert ended.returncode == 2
    assert ended.stderr.startswith("forebay: ") and ended.stderr.count("\n") == 1, ended.stderr
    assert f"forebay[{extra}]" in ended.stderr


def test_the_smallest_extra_that_brings_a_module_is_named() -> None:
    found = {
        name: extra_with(name)
        for name in ("pyspark.sql", "sqlglot", "deltalake", "httpx", "numpy", "prometheus_client")
    }

    assert found == {
        "pyspark.sql": "spark",
        "sqlglot": "spark",
        "deltalake": "lake",
        "httpx": "client",
        "numpy": None,
        "prometheus_client": "broker",
    }
    assert {extra for extra in declared() if extra} == set(_PROMISING) - {"testing"}


def test_what_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastavro", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(Unsupported, match=r'"forebay\[lake\]"'):
        AvroValues({"type": "record", "name": "order", "fields": []}, pa.struct([]))
    with pytest.raises(Unsupported, match=r'"forebay\[plot\]"'):
        require_plots()
