"""The worker that opens shards again which a lost session has closed here: many in one transaction, unasked.

A session that ends (etcd did not answer, the process stood still) closes every shard that was acquired in it. Without
this each would wait for its next use. It takes nothing from another directory: what is recorded as this directory's is
acquired, and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from forebay.clock import Clock
from forebay.errors import Closed, ForebayError, Indeterminate, Unavailable
from forebay.storage.recovery import Recovered
from forebay.topics import ShardRef
from forebay.workers import Worker

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.25
PAUSE_SECONDS: Final = 0.5
"""After an attempt that failed; twice as long after each further one."""
PAUSE_MAX_SECONDS: Final = 15.0


class ReopenWorker:
    """Opens shards again that were lost, all that are known at once, until none is left."""

    def __init__(self, recover: Callable[[Sequence[ShardRef]], Recovered], clock: Clock) -> None:
        """`recover` opens those of some shards that are this directory's still; see `OwnerShards.recover`."""
        self._recover = recover
        self._clock = clock
        self._lost: dict[str, ShardRef] = {}
        self._pause_s = PAUSE_SECONDS
        self._next_at = float("-inf")
        self.worker = Worker("forebay-reopening", self.step, clock=clock, interval_s=LOOK_SECONDS)

    def ask(self, ref: ShardRef) -> None:
        """Open this shard again soon; it was closed because its session had ended. Waits for nothing."""
        self._lost[ref.id] = ref
        self.worker.start()

    def step(self) -> None:
        """Open what was lost. Called by the worker's thread, and by tests."""
        lost = self._lost.copy()
        if not lost or self._clock.monotonic() < self._next_at:
            return
        for shard_id in lost:
            self._lost.pop(shard_id, None)
        try:
            recovered = self._recover(list(lost.values()))
        except Closed:
            return
        except ForebayError as error:
            self._try_again(list(lost.values()), error)
            return
        left = [one for one in recovered.failed if isinstance(one.error, Unavailable | Indeterminate)]
        logger.info("%d shards are open again after their session had ended", recovered.opened)
        if left:
            self._try_again([one.ref for one in left], left[0].error)
        else:
            self._pause_s = PAUSE_SECONDS

    def _try_again(self, refs: Sequence[ShardRef], error: ForebayError) -> None:
        """Note them once more, unless they were lost again meanwhile; later each time, and not with others at once."""
        for ref in refs:
            self._lost.setdefault(ref.id, ref)
        jitter = 0.5 + self._clock.random_bytes(1)[0] / 512
        self._next_at = self._clock.monotonic() + self._pause_s * jitter
        logger.warning(
            "%d shards wait to be opened again, next in %.1f s: %s", len(self._lost), self._pause_s * jitter, error
        )
        self._pause_s = min(PAUSE_MAX_SECONDS, 2 * self._pause_s)
