"""Removes the recorded state of a deleted topic. Every step may be repeated."""

from __future__ import annotations

import msgspec

from forebay.catalog import StoredState, read_state
from forebay.catalog.transact import Done, Write, transact
from forebay.format.descriptor import Phase, ShardState
from forebay.format.keys import shard_of_state
from forebay.format.value import encode_value
from forebay.metadata import DeleteRange, MetadataStore, Put, RevisionIs


def mark_deleting(metadata: MetadataStore, key: str, incarnation: str) -> ShardState | None:
    """On return no owner, present or future, can change this shard's history any more; its state, if it has one."""

    def deleting(stored: StoredState | None) -> Write[ShardState | None] | Done[ShardState | None]:
        if stored is None or stored.state.incarnation != incarnation:
            return Done(None)
        if stored.state.phase is Phase.DELETING:
            return Done(stored.state)
        state = msgspec.structs.replace(
            stored.state, phase=Phase.DELETING, epoch=stored.state.epoch + 1, owner=None, target=None
        )
        put = Put(key, encode_value(state, unknown=stored.unknown))
        return Write([RevisionIs(key, stored.revision)], [put], state)

    what = f"{shard_of_state(key)}: its deletion is not recorded"
    return transact(metadata, lambda: read_state(metadata, key), deleting, what=what)


def forget_shard(metadata: MetadataStore, key: str, incarnation: str) -> None:
    """Remove the state and the catalog of a deleted shard, unless the name belongs to a new topic already."""
    stored = read_state(metadata, key)
    if stored is not None and stored.state.incarnation == incarnation:
        metadata.transaction([RevisionIs(key, stored.revision)], [DeleteRange(key.removesuffix("state"))])
