"""Data directories that share a metadata store, and commands on each of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from forebay.settings import Settings
from forebay.storage import Storage
from tests.cli.rig import Outcome, Shell

TOPIC = "shop/orders"
QUICK = {"wal": {"free_bytes_min": 0, "reserve_records_min": 64}, "runtime": {"maintenance_interval_ms": 5}}


class CommandEnvironment:
    """Directories below one root. The settings file says what they share."""

    def __init__(self, root: Path, mode: str = "shared_fs", **groups: dict[str, object]) -> None:
        self.root = root
        self.file = root / "settings.yaml"
        place: dict[str, dict[str, object]]
        if mode == "local":
            place = {"storage": {"handoff_root": f"{root}/handoff"}}
        else:
            place = {"storage": {"mode": "shared_fs"}, "store": {"root": f"{root}/store"}}
        self.tree = {**QUICK, **place, "metadata": {"path": f"{root}/shared.sqlite"}, **groups}
        self.file.write_text(json.dumps(self.tree))

    @property
    def settings(self) -> Settings:
        return Settings.load(str(self.file))

    def words(self, directory: str) -> list[str]:
        """The options that name a directory and the settings."""
        return ["--data", str(self.root / directory), "--settings", str(self.file)]

    def run(self, directory: str, *words: str, stdin: bytes = b"") -> Outcome:
        """Run a command on one of the directories."""
        return Shell(self.root / directory).run(*words, "--settings", str(self.file), stdin=stdin)

    def ok(self, directory: str, *words: str, stdin: bytes = b"") -> Outcome:
        """Run a command that must succeed."""
        outcome = self.run(directory, *words, stdin=stdin)
        assert outcome.code == 0, outcome.err
        return outcome

    def open(self, directory: str) -> Storage:
        """The directory held open, as by another process."""
        return Storage.open(self.root / directory, self.settings)

    def produce(self, directory: str, first: int, stop: int, topic: str = TOPIC) -> None:
        """Append the numbers as lines."""
        self.ok(directory, "produce", topic, stdin=b"".join(b"%d\n" % number for number in range(first, stop)))

    def numbers(self, directory: str, topic: str = TOPIC) -> list[int]:
        """Every record of a topic that holds numbers."""
        return [int(line) for line in self.ok(directory, "consume", topic).out.split()]

    def shown(self, directory: str, topic: str = TOPIC) -> dict[str, Any]:
        """What `topic show` says."""
        return self.ok(directory, "topic", "show", topic, "--json").items[0]

    def files(self, directory: str) -> list[str]:
        """Every file of its shards, without those set aside."""
        shards = self.root / directory / "shards"
        return sorted(str(path.relative_to(shards)) for path in shards.glob("*/*.*"))


def child(act: str, *words: str) -> list[str]:
    """The command line of a child process of the tests."""
    return [sys.executable, "-m", "tests.cli.children", act, *words]
