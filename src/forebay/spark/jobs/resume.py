"""Notes of what a job has done, in a file: a job that was interrupted goes on behind them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from forebay.decoders import decoder
from forebay.errors import Invalid

R = TypeVar("R")


class Notes:
    """A file with a line for everything that is done. Lost notes cost work, nothing else."""

    def __init__(self, path: str | None, *, read_only: bool = False) -> None:
        self._path = Path(path) if path is not None and not read_only else None
        self._done: set[str] = set()
        for line in _whole_lines(path, read_only=read_only):
            try:
                self._done.add(decoder(str).decode(line))
            except msgspec.MsgspecError as error:
                raise Invalid(f"{path} does not hold the notes of a job ({error}): name another file") from error

    def __contains__(self, name: str) -> bool:
        return name in self._done

    def add(self, names: Iterable[str]) -> None:
        """These are done."""
        new = [name for name in names if name not in self._done]
        self._done.update(new)
        if self._path is not None and new:
            with self._path.open("ab") as file:
                file.write(b"".join(msgspec.json.encode(name) + b"\n" for name in new))


class Results(Generic[R]):
    """Results by the name of what they are of, in a file, for a run that works the same out again."""

    def __init__(self, path: str | None, kind: type[R], *, read_only: bool = False) -> None:
        self._path = Path(path) if path is not None and not read_only else None
        self._kind = kind
        self._known: dict[str, R] = {}
        for line in _whole_lines(path, read_only=read_only):
            try:
                name, result = decoder(tuple[str, kind]).decode(line)  # type: ignore[valid-type]
            except msgspec.MsgspecError as error:
                raise Invalid(f"{path} does not hold the results of this job ({error}): name another file") from error
            self._known[name] = result

    def get(self, name: str) -> R | None:
        """The result that was noted."""
        return self._known.get(name)

    def add(self, name: str, result: R) -> None:
        """Note a result."""
        self._known[name] = result
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode((name, result)) + b"\n")


def _whole_lines(path: str | None, *, read_only: bool) -> list[bytes]:
    """The lines of a file, if there is one; a line that a crash cut short is removed from it, unless `read_only`."""
    if path is None or not Path(path).exists():
        return []
    content = Path(path).read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content and not read_only:
        with Path(path).open("r+b") as file:
            file.truncate(len(whole))
    return whole.splitlines()
