"""What compaction replaced goes once its grace is over, also where no owner comes to sweep it."""

from __future__ import annotations

from forebay.catalog.replaced import Replaced
from forebay.cleanup.collector import Leftovers
from forebay.shard import ShardRef
from forebay.spark.jobs.leases import Lease
from forebay.spark.opening import Opened


def is_owned(found: Opened, ref: ShardRef) -> bool:
    """Whether a living process has the shard: then that one sweeps."""
    stored = found.catalog(ref).state()
    owner = stored.state.owner if stored is not None else None
    return owner is not None and found.metadata.session_alive(owner)


def sweep_unowned(found: Opened, ref: ShardRef, lease: Lease) -> int:
    """Remove objects of a shard that nobody needs, by the rules that its owner has; how many. None if it has one.

    `lease` is that of the compaction of the shard: nobody else may be about to name what lies there.
    """
    if is_owned(found, ref):
        return 0
    places = found.places
    left = Leftovers(
        ref=ref,
        catalog=found.catalog(ref),
        metadata=found.metadata,
        settings=found.settings,
        places=places,
        clock=found.clock,
        replaced=Replaced(found.clock),
    )

    def compacting() -> bool:
        # Asked once the objects are listed: what was listed while another had the lease is not ours to judge.
        lease.check()
        return False

    swept: list[str] = []
    if found.directory is not None:
        swept += [*left.sweep_private(compacting), *left.sweep_loads(places.loads)]
    if found.settings.is_shared and places.store is not None:
        swept += [*left.sweep_shared(compacting), *left.sweep_loads(places.store)]
    return len(swept)
