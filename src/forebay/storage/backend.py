"""What a log is opened on, as Protocols: one complete backend for each way of opening it, chosen once, at the opening.

`OwnerBackend` has a data directory to itself, `ReadOnlyBackend` sees one beside its owner, `InMemoryBackend` keeps
everything in this process. What only the first and the last can do is in `WritableBackend`: code that changes
something asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forebay.cleanup.deleted_topics import Deletions
from forebay.definitions import Definitions
from forebay.engines import OwnedShard
from forebay.loads.service import Loads
from forebay.metadata import MetadataStore
from forebay.meter import LogMeter
from forebay.storage.alter import Alterations
from forebay.storage.background.commit import Committers
from forebay.storage.background.definitions import DefinitionsWorker
from forebay.storage.background.limits import LimitsWorker
from forebay.storage.create import Creations
from forebay.storage.cursors import Cursors
from forebay.storage.erasure.answer import ShardErasure
from forebay.storage.moves import Moves
from forebay.storage.recovery import Progress, Recovered
from forebay.storage.shards import Shards
from forebay.storage.usage import TierUsage
from forebay.storage.views import TopicViews
from forebay.subscriptions.definitions import SubscriptionStore
from forebay.topics import ShardRef, TopicSpec
from forebay.workers import Background


class Backend(Protocol):
    """What every log has. Complete once it is made; safe for concurrent use."""

    metadata: MetadataStore
    definitions: Definitions
    alterations: Alterations
    cursors: Cursors
    subscriptions: SubscriptionStore
    """The definitions of subscriptions."""
    following: DefinitionsWorker
    """Goes by what other processes change in definitions."""
    committers: Committers
    """Commits what callers queued that do not wait."""
    background: Background
    """All workers, whatever they serve."""
    meter: LogMeter
    """What the log has done since it was opened."""
    is_read_only: bool

    @property
    def shards(self) -> Shards:
        """Its shards, to own or to read."""

    @property
    def path(self) -> str | None:
        """The absolute path of the data directory, if there is one."""

    def free_bytes(self) -> dict[str, int]:
        """The free bytes of each disk that it writes to, by what lies there: `data`, `log`. Asks the system."""

    @property
    def directory_id(self) -> str | None:
        """The name by which states and moves know the data directory, if there is one."""

    def writable(self) -> WritableBackend:
        """The same, for callers that change something; `Unsupported` where only reading is possible."""

    def recover(self, on_progress: Progress) -> Recovered:
        """See `Storage.recover`."""

    def close(self) -> None:
        """End everything in order; a call that failed is finished by the next."""


class WritableBackend(Backend, Protocol):
    """A log that this process may change."""

    default_durability: str | None
    """The durability of a topic that is created without naming one or an engine; `None` for that of topics."""
    limits: LimitsWorker
    deletions: Deletions
    creations: Creations

    @property
    def loads(self) -> Loads:
        """Bulk loads into the topics here; `Unsupported` where no topic takes one."""

    @property
    def views(self) -> TopicViews:
        """Topics as they lie, for readers of whole topics; `Unsupported` where nothing lies anywhere."""

    def check_creation(self, spec: TopicSpec) -> None:
        """`Unsupported` if such a topic cannot live here."""

    def moves_of(self, spec: TopicSpec) -> Moves:
        """What exports, seals and moves such a topic; `Unsupported` where that cannot be."""

    def forget(self, ref: ShardRef) -> None:
        """Stop all work on a shard in the background and wait for it, before the shard is given up or removed.

        Called by a thread that holds no lock: an export may wait for the store.
        """

    def retain(self, shard: OwnedShard) -> int:
        """Remove local files of the shard by `retention`; how many."""

    def usage(self, specs: Sequence[TopicSpec]) -> list[TierUsage]:
        """See `Storage.usage`, of these topics."""

    def clear_moved(self) -> None:
        """See `Storage.clear_moved`."""

    def erasure_of(self, shard: OwnedShard) -> ShardErasure:
        """What finds and rewrites the bytes of erased records of a shard here."""
