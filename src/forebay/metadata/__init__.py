"""The metadata store: small facts that must never contradict each other.

It knows keys, values, revisions and sessions, nothing of what they mean; a common prefix of the keys is
the caller's work. `MetadataStore` is a Protocol; `MemoryMetadata` forgets at the end of the process,
`SqliteMetadata` keeps one file for the processes of one machine. `EtcdMetadata`, for many machines, is loaded
from `forebay.metadata.etcd` by who asks for it.
"""

from forebay.metadata.memory import MemoryMetadata, MemoryState
from forebay.metadata.seam import (
    HISTORY_BYTES_MAX,
    HISTORY_CHANGES_MAX,
    OPERATIONS_MAX,
    TRANSACTION_BYTES_MAX,
    Absent,
    Change,
    Compacted,
    Compare,
    Delete,
    DeleteRange,
    Entry,
    Exists,
    MetadataStore,
    Operation,
    Outcome,
    Put,
    RevisionIs,
    Session,
    SessionEnded,
    ValueIs,
    Watch,
)
from forebay.metadata.sqlite import SqliteMetadata

__all__ = [
    "HISTORY_BYTES_MAX",
    "HISTORY_CHANGES_MAX",
    "OPERATIONS_MAX",
    "TRANSACTION_BYTES_MAX",
    "Absent",
    "Change",
    "Compacted",
    "Compare",
    "Delete",
    "DeleteRange",
    "Entry",
    "Exists",
    "MemoryMetadata",
    "MemoryState",
    "MetadataStore",
    "Operation",
    "Outcome",
    "Put",
    "RevisionIs",
    "Session",
    "SessionEnded",
    "SqliteMetadata",
    "ValueIs",
    "Watch",
]
