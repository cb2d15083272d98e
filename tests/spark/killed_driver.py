"""Drivers of loads that end themselves with kill -9 at one of their transactions.

`python -m tests.spark.killed_driver` reads `MOMENT NUMBER TASK` from each line, delivers the task, which is pickled and
in base64, dies `before` or `after` the transaction of that number, and says how that ended. Each driver is a fork of
this process, to be quick.
"""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

from forebay.metadata import Compare, MetadataStore, Operation, Outcome
from forebay.spark.place import opening
from forebay.spark.writing import delivery
from forebay.storage import owner
from tests.support.processes import die, hear

_ROOT: Final = Path(__file__).parents[2]


class KilledDrivers:
    """The process whose forks are drivers."""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.spark.killed_driver"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT
        ).__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.__exit__(None, None, None)

    def deliver(self, moment: str, number: int, task: tuple[Any, ...]) -> int:
        """What a driver ends with that delivers this, and dies then."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{moment} {number} {base64.b64encode(pickle.dumps(task)).decode()}\n")
        self._process.stdin.flush()
        return int(hear(self._process))


def _die_at(moment: str, number: int) -> None:
    """Count transactions, those of the driver and those of the owner that it becomes."""
    plain, count = vars(opening)["open_metadata"], 0

    def opened(*arguments: Any, **named: Any) -> MetadataStore:
        store: MetadataStore = plain(*arguments, **named)
        done = store.transaction

        def transaction(compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
            nonlocal count
            count += 1
            if (count, moment) == (number, "before"):
                die()
            outcome = done(compares, operations)
            if (count, moment) == (number, "after"):
                die()
            return outcome

        vars(store)["transaction"] = transaction
        return store

    vars(opening)["open_metadata"] = vars(owner)["open_metadata"] = opened


def _drive(moment: str, number: str, task: str) -> None:
    _die_at(moment, int(number))
    delivery.deliver(*pickle.loads(base64.b64decode(task)))


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _drive(*line.split())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201 - the test receives it


if __name__ == "__main__":
    main()
