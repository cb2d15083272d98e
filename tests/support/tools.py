"""The programs of `tools`, which are no package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

_TOOLS: Final = Path(__file__).parents[2] / "tools"


def tool(name: str) -> ModuleType:
    """The program `tools/NAME.py`, loaded and not run."""
    spec = importlib.util.spec_from_file_location(name, _TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found  # where its dataclasses look for the names in their annotations
    spec.loader.exec_module(found)
    return found
