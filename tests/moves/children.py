"""An owner in a process of its own: `python -m tests.moves.children <root> <name> <endpoints of etcd, or -> <ttl_s>`.

It does what each line of input says and answers with one line, written after the call returned.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

from forebay import ForebayError, Storage
from forebay.storage.background import cleanup
from tests.support.environments import directories
from tests.support.environments.directories import TOPIC, Environment
from tests.support.processes import hear

ROOT = Path(__file__).parents[2]


class OwnerChild:
    """The parent's side."""

    def __init__(self, root: Path, name: str, endpoints: tuple[str, ...] = (), *, ttl_s: int = 60) -> None:
        command = [sys.executable, "-m", "tests.moves.children", str(root), name]
        command += [",".join(endpoints) or "-", str(ttl_s)]
        self.name = name
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert hear(self._child) == "ready"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        self._child.stdout.close()

    def do(self, *words: object) -> str:
        """One thing, and what came of it."""
        self.begin(*words)
        return self.heard()

    def begin(self, *words: object) -> None:
        """The same, without waiting."""
        assert self._child.stdin is not None
        self._child.stdin.write(" ".join(map(str, words)) + "\n")
        self._child.stdin.flush()

    def heard(self) -> str:
        """What it says next."""
        return hear(self._child)

    def signal(self, number: int) -> None:
        self._child.send_signal(number)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGCONT)
            self._child.kill()
        self._child.wait()


def environment_of(root: Path, endpoints: tuple[str, ...], *, ttl_s: int = 60) -> Environment:
    """Directories as parent and children see them."""
    environment = directories.shared_fs(root)
    return directories.in_etcd(environment, endpoints, f"/{root.name}", ttl_s=ttl_s) if endpoints else environment


class Servant:
    """The child's side."""

    def __init__(self, log: Storage) -> None:
        self._log = log

    def obey(self, word: str, *rest: str) -> str:
        if word == "create":
            self._log.create_topic(TOPIC, durability=rest[0], on_owner_loss="take_over")
            return "done"
        topic = self._log.topic(TOPIC)
        if word == "append":
            first = topic.append_many([value.encode() for value in rest])[0]
            return f"acked {first}"
        if word == "flood":
            # Until the first refusal. Each acknowledgement says whether the file was there before its append began.
            while True:
                since = "after" if Path(rest[0]).exists() else "before"
                say(f"acked {topic.append(b'flood')} {since}")
        if word == "export":
            self._log.export_topic(TOPIC)
            return "done"
        if word == "seal-and-die":
            self._log.seal_topic(TOPIC, on_file=lambda _: os.kill(os.getpid(), signal.SIGKILL))
        raise AssertionError(word)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(root: str, name: str, endpoints: str, ttl_s: str) -> None:
    cleanup.LOOK_SECONDS = 600.0  # type: ignore[attr-defined]  # nobody looks after the lease in the background: each append must
    environment = environment_of(Path(root), () if endpoints == "-" else tuple(endpoints.split(",")), ttl_s=int(ttl_s))
    servant = Servant(environment.open(name))
    say("ready")
    for line in sys.stdin:
        try:
            say(servant.obey(*line.split()))
        except ForebayError as error:
            say(f"{type(error).__name__} {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
