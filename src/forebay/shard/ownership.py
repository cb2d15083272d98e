"""Who owns a shard: one session at a time, each with a higher epoch than all before.

Rests on transactions that compare, never on a clock. Knows the metadata store alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from forebay.errors import Conflict, Unavailable
from forebay.format.descriptor import Phase, ShardState
from forebay.format.value import Unknown, decode_value, encode_value
from forebay.metadata import Compare, MetadataStore, Put, RevisionIs, SessionEnded

BATCH_SHARDS = 40
"""Two comparisons each stay below the limit of a transaction."""
ATTEMPTS = 5


class Owner(NamedTuple):
    """Whoever opens shards here: a session, and the directory its logs lie in."""

    session: str
    holder: str


class StoredState(NamedTuple):
    """A shard's state as found, with what is needed to change it."""

    state: ShardState
    unknown: Unknown
    revision: int


def read_state(store: MetadataStore, key: str) -> StoredState | None:
    """The recorded state; `None` only if the store says that there is none."""
    entry = store.get(key)
    if entry is None:
        return None
    state, unknown = decode_value(entry.value, ShardState)
    return StoredState(state, unknown, entry.mod_revision)


class Acquired(NamedTuple):
    """A shard that is ours: its state before, and the epoch it has now."""

    before: ShardState
    epoch: int


def acquire(store: MetadataStore, keys: Sequence[str], owner: Owner) -> list[Acquired]:
    """Make `owner` the owner of all these shards, each in a new epoch; as few transactions as the limits allow.

    On return no other session can change them. Raises `Unavailable` if a living session has one.
    """
    acquired: list[Acquired] = []
    for first in range(0, len(keys), BATCH_SHARDS):
        acquired += _acquire_batch(store, keys[first : first + BATCH_SHARDS], owner)
    return acquired


def _acquire_batch(store: MetadataStore, keys: Sequence[str], owner: Owner) -> list[Acquired]:
    for _ in range(ATTEMPTS):
        found = [_known(store, key) for key in keys]
        compares: list[Compare] = []
        puts = []
        for key, stored in zip(keys, found, strict=True):
            compares.append(RevisionIs(key, stored.revision))
            if stored.state.owner is not None and stored.state.owner != owner.session:
                compares.append(SessionEnded(stored.state.owner))
            puts.append(Put(key, encode_value(taken(stored.state, owner), unknown=stored.unknown)))
        if store.transaction(compares, puts).succeeded:
            return [Acquired(stored.state, stored.state.epoch + 1) for stored in found]
        for key, stored in zip(keys, found, strict=True):
            if stored.state.owner not in (None, owner.session) and store.session_alive(stored.state.owner or ""):
                raise Unavailable(
                    f"{key} is owned by the living session {stored.state.owner} in {stored.state.holder}: "
                    "close it there first"
                )
    raise Unavailable(f"{keys[0]}: ownership changed {ATTEMPTS} times while it was being acquired; try again")


def _known(store: MetadataStore, key: str) -> StoredState:
    stored = read_state(store, key)
    if stored is None or stored.state.phase is Phase.DELETING:
        raise Conflict(f"{key} is gone: the topic was deleted")
    return stored


def taken(state: ShardState, owner: Owner) -> ShardState:
    """The state after `owner` acquired the shard."""
    epoch = state.epoch + 1
    since = state.holder_since if state.holder == owner.holder else epoch
    return msgspec.structs.replace(state, epoch=epoch, owner=owner.session, holder=owner.holder, holder_since=since)
