"""Notes of what a job has done, in a file: a job that was interrupted goes on behind them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from forebay.errors import Invalid


class Notes:
    """A file with a line for everything that is done. Lost notes cost work, nothing else."""

    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path is not None else None
        self._done: set[str] = set()
        if self._path is not None and self._path.exists():
            content = self._path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            try:
                self._done = {msgspec.json.decode(line, type=str) for line in whole.splitlines()}
            except msgspec.MsgspecError as error:
                raise Invalid(f"{path} does not hold the notes of a job ({error}): name another file") from error
            if whole != content:
                # A line that a crash cut short is no note.
                with self._path.open("r+b") as file:
                    file.truncate(len(whole))

    def __contains__(self, name: str) -> bool:
        return name in self._done

    def add(self, names: Iterable[str]) -> None:
        """These are done."""
        new = [name for name in names if name not in self._done]
        self._done.update(new)
        if self._path is not None and new:
            with self._path.open("ab") as file:
                file.write(b"".join(msgspec.json.encode(name) + b"\n" for name in new))
