"""Removes the recorded state of a deleted topic. Every step may be repeated."""

from __future__ import annotations

import contextlib

import msgspec

from forebay.catalog import read_state
from forebay.errors import Indeterminate, Unavailable
from forebay.format.descriptor import Phase, ShardState
from forebay.format.value import encode_value
from forebay.metadata import DeleteRange, MetadataStore, Put, RevisionIs
from forebay.shard.ownership import ATTEMPTS


def mark_deleting(metadata: MetadataStore, key: str, incarnation: str) -> ShardState | None:
    """On return no owner, present or future, can change this shard's history any more; its state, if it has one."""
    for _ in range(ATTEMPTS):
        stored = read_state(metadata, key)
        if stored is None or stored.state.incarnation != incarnation:
            return None
        if stored.state.phase is Phase.DELETING:
            return stored.state
        state = msgspec.structs.replace(
            stored.state, phase=Phase.DELETING, epoch=stored.state.epoch + 1, owner=None, target=None
        )
        put = Put(key, encode_value(state, unknown=stored.unknown))
        with contextlib.suppress(Indeterminate):
            if metadata.transaction([RevisionIs(key, stored.revision)], [put]).succeeded:
                return state
    raise Unavailable(f"{key} changed {ATTEMPTS} times while its deletion was being recorded; try again")


def forget_shard(metadata: MetadataStore, key: str, incarnation: str) -> None:
    """Remove the state and the catalog of a deleted shard, unless the name belongs to a new topic already."""
    stored = read_state(metadata, key)
    if stored is not None and stored.state.incarnation == incarnation:
        metadata.transaction([RevisionIs(key, stored.revision)], [DeleteRange(key.removesuffix("state"))])
