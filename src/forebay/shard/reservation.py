"""Offsets reserved in a shard's recorded state, for logs whose own disk may not be there next time."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from forebay.errors import Fenced, Unavailable
from forebay.format.value import encode_value
from forebay.metadata import MetadataStore, Put, RevisionIs
from forebay.shard.ownership import ATTEMPTS, read_state


def reserve_in_state(store: MetadataStore, key: str, epoch: int) -> Callable[[int], int]:
    """A function that makes a reservation up to an offset durable and returns the offset that is reserved then.

    It raises `Fenced` once a newer epoch owns the shard, and whatever the store raises when it is out of reach.
    """

    def reserve(end: int) -> int:
        for _ in range(ATTEMPTS):
            stored = read_state(store, key)
            if stored is None or stored.state.epoch != epoch:
                raise Fenced(f"{key} has a newer owner than epoch {epoch}: this one stops")
            if stored.state.reserved_end >= end:
                return stored.state.reserved_end
            state = msgspec.structs.replace(stored.state, reserved_end=end)
            put = Put(key, encode_value(state, unknown=stored.unknown))
            if store.transaction([RevisionIs(key, stored.revision)], [put]).succeeded:
                return end
        raise Unavailable(f"{key} changed {ATTEMPTS} times while offsets were being reserved; try again")

    return reserve
