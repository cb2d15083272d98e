"""What the tests of Forebay are made of, and of any store, engine or server beside its own. Shipped.

`simulated` takes the place of the machine: disk, clock, blobs and metadata, with faults asked for by name. `checks`
judges what was done, `contracts` has the suites that the real and the simulated ones pass, and `inside` opens a log to
a test.

Nothing outside of tests imports this room.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

_MOVED: Final = {
    "blobs": "simulated",
    "catalogs": "checks",
    "clock": "simulated",
    "conformance": "checks",
    "crashes": "simulated",
    "cursors": "checks",
    "damage": "simulated",
    "disk": "simulated",
    "durability": "simulated",
    "faults": "simulated",
    "history": "checks",
    "interleavings": "checks",
    "invariants": "checks",
    "metadata": "simulated",
    "moves": "checks",
    "schedules": "checks",
    "trace": "simulated",
    "volume": "simulated",
}
"""Where the modules are that once lay here side by side: programs that import them from here go on."""


class _OldPaths(MetaPathFinder, Loader):
    """Gives each module that moved under its old path, too: the same module, so that there is one of each class."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, module = name.rpartition(".")
        return ModuleSpec(name, self) if package == __name__ and module in _MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = spec.name.rpartition(".")[2]
        found = import_module(f"{__name__}.{_MOVED[module]}.{module}")
        spec.loader_state = found.__spec__
        return found

    def exec_module(self, module: ModuleType) -> None:
        # It was run under its own path. The import system has given it the other one's spec.
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.append(_OldPaths())
