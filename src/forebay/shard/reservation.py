"""What the owner of a shard notes in its recorded state: reserved offsets, and where producers are not known."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from forebay.format.descriptor import Phase, ShardState
from forebay.metadata import MetadataStore
from forebay.shard.ownership import change_state


def reserve_in_state(store: MetadataStore, key: str, epoch: int) -> Callable[[int], int]:
    """A function that makes a reservation up to an offset durable and returns the offset that is reserved then.

    It raises `Fenced` once a newer epoch owns the shard, and whatever the store raises when it is out of reach.
    """

    def reserve(end: int) -> int:
        def raised(state: ShardState) -> ShardState:
            if state.phase is Phase.SEALED:
                # Given up meanwhile: the next owner goes on exactly where the seal ended.
                return state
            return msgspec.structs.replace(state, reserved_end=max(end, state.reserved_end))

        return change_state(store, key, epoch, raised).reserved_end

    return reserve


def tell_reserved(store: MetadataStore, key: str, epoch: int, end: int) -> None:
    """The log was the only one to know how far its offsets went; on return the state says so, for all below `end`."""

    def told(state: ShardState) -> ShardState:
        return msgspec.structs.replace(state, reserved_end=max(end, state.reserved_end), reserved_in_log=False)

    change_state(store, key, epoch, told)


def tell_unknown(store: MetadataStore, key: str, epoch: int, below: int) -> None:
    """Appends of producers below this offset may be unknown; 0 if none are. On return the state says so."""

    def told(state: ShardState) -> ShardState:
        return msgspec.structs.replace(state, unknown_below=below or msgspec.UNSET)

    change_state(store, key, epoch, told)
