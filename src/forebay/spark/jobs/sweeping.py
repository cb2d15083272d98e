"""What compaction replaced goes once its grace is over, also where no owner comes to sweep it."""

from __future__ import annotations

from forebay.cleanup.objects import ObjectCleanup
from forebay.metadata.leases import Lease
from forebay.spark.place.opening import Opened
from forebay.topics import ShardRef


def is_owned(found: Opened, ref: ShardRef) -> bool:
    """Whether a living process has the shard: then that one sweeps."""
    stored = found.catalog(ref).state()
    owner = stored.state.owner if stored is not None else None
    return owner is not None and found.metadata.session_alive(owner)


def sweep_unowned(found: Opened, ref: ShardRef, lease: Lease) -> int:
    """Remove objects of a shard that are needed no more, by the rules that its owner has; how many. None if it has one.

    `lease` is that of the compaction of the shard: no other job may be about to name what lies there.
    """
    if is_owned(found, ref):
        return 0
    places = found.places
    cleanup = ObjectCleanup(found.metadata, found.settings, places, found.clock)

    def is_compacting() -> bool:
        # Asked once the objects are listed: what was listed while another had the lease is not ours to judge.
        lease.check()
        return False

    removed: list[str] = []
    if found.directory is not None:
        removed += cleanup.collect_private(ref, is_compacting)
        removed += cleanup.collect_loads(ref, places.loads, is_compacting)
    if found.settings.is_shared and places.store is not None:
        removed += cleanup.collect_shared(ref, is_compacting)
        removed += cleanup.collect_loads(ref, places.store, is_compacting)
    return len(removed)
