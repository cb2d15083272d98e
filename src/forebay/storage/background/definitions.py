"""The worker that follows what other processes change in the definitions of topics, so that this one goes by it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from forebay.clock import Clock
from forebay.errors import ForebayError
from forebay.locks import Rank, RankedRLock
from forebay.metadata import Compacted, Watch
from forebay.storage.alter import Alterations
from forebay.storage.definitions import FOLLOW_SECONDS, DefinitionChanges, Definitions
from forebay.workers import STOP_SECONDS, Worker

logger = logging.getLogger(__name__)


class DefinitionsWorker:
    """Keeps the remembered definitions, the handles and the shards of a log to what the metadata store says."""

    def __init__(
        self,
        definitions: Definitions,
        alterations: Alterations,
        *,
        clock: Clock,
        on_changes: Callable[[DefinitionChanges], None],
    ) -> None:
        """`on_changes` is called with every definition that is there at first, and with what changes later."""
        self._definitions = definitions
        self._alterations = alterations
        self._on_changes = on_changes
        self._following = RankedRLock(Rank.ROUND, "storage.following")
        """Held by the thread that asks for changes to topics; others leave it to that one."""
        self._watch: Watch | None = None
        self._is_away = False
        """Whether the last look has failed, which was logged."""
        self.worker = Worker("forebay-definitions", self.step, clock=clock, interval_s=FOLLOW_SECONDS)

    def step(self) -> None:
        """Go by what has changed. Asks the metadata store, in the worker's thread or that of another worker."""
        if not self._following.acquire(blocking=False):
            return
        try:
            self._follow()
            self._is_away = False
        except ForebayError as error:
            self._end_watch()
            if not self._is_away:
                logger.warning("changes to topics are not seen for now, and definitions are read each time: %s", error)
            self._is_away = True
            self.worker.note_failure(error)
        finally:
            self._following.release()

    def end(self) -> None:
        """Give back what it has of the metadata store, after a thread that asks it for changes now."""
        is_ours = self._following.acquire(timeout=STOP_SECONDS)
        try:
            self._end_watch()
        finally:
            if is_ours:
                self._following.release()

    def _follow(self) -> None:
        if self._watch is None:
            # First the watch, then the look: a change in between is seen twice rather than never.
            self._watch = self._definitions.watch()
            self._take(
                DefinitionChanges({defined.spec.name: defined for defined in self._definitions.all_defined()}, {})
            )
        try:
            self._take(self._definitions.follow(self._watch))
        except Compacted:
            # Begin with a look at everything next time.
            self._end_watch()
            self.worker.wake()

    def _take(self, changes: DefinitionChanges) -> None:
        for defined in changes.defined.values():
            self._alterations.adopt_changed(defined)
        for spec in changes.deleted.values():
            if spec is not None:
                self._alterations.forget(spec.topic_id)
        self._on_changes(changes)

    def _end_watch(self) -> None:
        self._definitions.unfollow()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
