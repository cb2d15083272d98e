"""The catalog: which segments make a shard's history, and who may add to it. One transaction per change.

A change is compared with the revisions it was worked out from and with the owner's epoch, and is checked
against the rules before it is sent. Knows the metadata store; knows nothing of logs or objects.
"""

from forebay.catalog.rules import never_backwards, no_gap, no_overlap
from forebay.catalog.shard import (
    Frontier,
    ShardCatalog,
    ShardKeys,
    StoredState,
    decode_state,
    read_state,
    state_entries,
)

__all__ = [
    "Frontier",
    "ShardCatalog",
    "ShardKeys",
    "StoredState",
    "never_backwards",
    "no_gap",
    "no_overlap",
    "decode_state",
    "read_state",
    "state_entries",
]
