"""Changes the metadata store by what stands in it: look, compare, write, and look again where another came first.

The one loop of its kind. Every change that depends on what is stored is made here, so that all of them are limited,
wait before they try again, and say in the end what kept changing. Knows the metadata store; knows no meaning of a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from forebay.clock import Clock
from forebay.errors import Indeterminate, Unavailable
from forebay.metadata import Absent, Compare, Exists, MetadataStore, Operation, RevisionIs, SessionEnded, ValueIs

ATTEMPTS: Final = 24
PAUSE_S: Final = 0.0005
"""Before the third attempt; the second follows at once, and each later one after twice as long."""
PAUSE_MAX_S: Final = 0.05

Found = TypeVar("Found")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Write(Generic[Result]):
    """A change to be made in one transaction; `result` is the answer once it is made."""

    compares: Sequence[Compare]
    operations: Sequence[Operation]
    result: Result


@dataclass(frozen=True, slots=True)
class Done(Generic[Result]):
    """Nothing is to be written: what is stored is as wanted, perhaps by an attempt whose answer was lost."""

    result: Result


def transact(
    store: MetadataStore,
    read: Callable[[], Found],
    change: Callable[[Found], Write[Result] | Done[Result]],
    *,
    what: str,
    clock: Clock,
) -> Result:
    """Make the change that `change` works out from what `read` finds; its result, once it holds.

    Runs in the caller's thread and waits for the store, up to about a second where others keep changing the same
    keys. Both functions are called again for every attempt: `change` recognises what an earlier attempt has written,
    and what it raises comes out. In the end raises `Unavailable` with the keys that changed, and nothing was done; or
    `Indeterminate` if the store has not said what became of the last attempt, also where it cannot be asked any more.
    `what` names the change in both.
    """
    refused: Sequence[Compare] | None = ()
    for attempt in range(ATTEMPTS + 1):
        # Before the look, never between look and write: what changes while this waits would refuse the write.
        _back_off(clock, attempt)
        try:
            wanted = change(read())
            if isinstance(wanted, Done):
                return wanted.result
            if attempt == ATTEMPTS:
                break
            try:
                if store.transaction(wanted.compares, wanted.operations).succeeded:
                    return wanted.result
                refused = wanted.compares
            except Indeterminate:
                refused = None
        except Unavailable as error:
            if refused is None and type(error) is Unavailable:
                raise Indeterminate(f"{what}, as far as is known: {error}; look, and repeat it") from error
            raise
    if refused is None:
        raise Indeterminate(
            f"{what}, as far as is known: the store did not say what became of the last of {ATTEMPTS} attempts; "
            "look, and repeat it"
        )
    changed = ", ".join(_changed(store, refused)) or "what it goes by"
    raise Unavailable(f"{what}: {changed} changed {ATTEMPTS} times meanwhile; try again")


def _back_off(clock: Clock, attempt: int) -> None:
    """Wait a random while, longer each time, so that two callers that met do not meet again."""
    if not 2 <= attempt < ATTEMPTS:
        return
    longest = min(PAUSE_MAX_S, PAUSE_S * 2 ** (attempt - 2))
    clock.sleep(longest * (0.5 + clock.random_bytes(1)[0] / 512))


def _changed(store: MetadataStore, compares: Sequence[Compare]) -> list[str]:
    """What does not hold any more, by key."""
    return [
        f"session {compare.session}" if isinstance(compare, SessionEnded) else compare.key
        for compare in compares
        if not _holds(store, compare)
    ]


def _holds(store: MetadataStore, compare: Compare) -> bool:
    if isinstance(compare, SessionEnded):
        return not store.session_alive(compare.session)
    entry = store.get(compare.key)
    match compare:
        case Absent():
            return entry is None
        case Exists():
            return entry is not None
        case RevisionIs():
            return (entry.mod_revision if entry is not None else 0) == compare.mod_revision
        case ValueIs():
            return entry is not None and entry.value == compare.value
