"""The worker that follows what other processes change in the definitions of topics, so that this one goes by it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from forebay.clock import Clock
from forebay.definitions import FOLLOW_SECONDS, Defined, DefinitionChanges, Definitions
from forebay.errors import ForebayError
from forebay.locks import Rank, RankedRLock
from forebay.metadata import Compacted, Watch
from forebay.storage.alter import Alterations
from forebay.topics import TopicName, TopicSpec
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
        on_deleted: Callable[[TopicSpec], bool],
    ) -> None:
        """`on_changes` is called with every definition that is there at first, and with what changes later.

        `on_deleted` is called without a lock with each topic that was used here and is deleted, by this process or
        another. It drops what is kept of the topic, and waits for no shard: if it returns false, the next step calls it
        again.
        """
        self._definitions = definitions
        self._alterations = alterations
        self._on_changes = on_changes
        self._on_deleted = on_deleted
        self._deleted: dict[str, TopicSpec] = {}
        """By id, topics that are deleted and of which something is kept still."""
        self._suspects: dict[str, TopicSpec] = {}
        """By id, topics that may be deleted: to be looked at in the next step."""
        self._following = RankedRLock(Rank.ROUND, "storage.following")
        """Held by the thread that asks for changes to topics; others leave it to that one."""
        self._watch: Watch | None = None
        self._is_away = False
        """Whether the last look has failed, which was logged."""
        self.worker = Worker("forebay-definitions", self.step, clock=clock, interval_s=FOLLOW_SECONDS)

    def step(self, wait_s: float = 0.0) -> None:
        """Go by what has changed. Asks the metadata store, in the worker's thread or that of another caller.

        A thread that finds another one at it leaves it to that one, after `wait_s`.
        """
        # Taken inside: an exception (Ctrl-C) right after that must find the block that gives the lock back.
        try:
            if self._following.acquire(timeout=wait_s):
                self._follow_safely()
        finally:
            try:  # noqa: SIM105 - a call before the release could be interrupted
                self._following.release()
            except RuntimeError:
                pass  # another thread has it
        for spec in list(self._deleted.values()):
            if self._on_deleted(spec):
                self._deleted.pop(spec.topic_id, None)

    def suspect(self, spec: TopicSpec) -> None:
        """A topic that is used here from now on may have been deleted before that: look at it. Waits for nothing."""
        self._suspects[spec.topic_id] = spec
        self.worker.wake()

    def _follow_safely(self) -> None:
        """Go by what has changed. The caller has the lock."""
        try:
            self._follow()
            self._is_away = False
        except ForebayError as error:
            self._end_watch()
            if not self._is_away:
                logger.warning("changes to topics are not seen for now, and definitions are read each time: %s", error)
            self._is_away = True
            self.worker.note_failure(error)

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
            found = {defined.spec.name: defined for defined in self._definitions.all_defined()}
            # What was deleted while no watch was open is missing now, or has another id.
            suspects = {name for name in self._alterations.names() if not self._is_all_used(name, found.get(name))}
            self._take(DefinitionChanges(found, suspects))
        for spec in list(self._suspects.values()):
            self._deleted.update((gone.topic_id, gone) for gone in self._definitions.gone([spec]))
            del self._suspects[spec.topic_id]
        try:
            self._take(self._definitions.follow(self._watch))
        except Compacted:
            # Begin with a look at everything next time.
            self._end_watch()
            self.worker.wake()

    def _is_all_used(self, name: TopicName, defined: Defined | None) -> bool:
        """Whether this is all of that name that is used here."""
        return defined is not None and all(s.topic_id == defined.spec.topic_id for s in self._alterations.used(name))

    def _take(self, changes: DefinitionChanges) -> None:
        for defined in changes.defined.values():
            self._alterations.adopt_changed(defined)
        self._on_changes(changes)
        for name in changes.deleted:
            used = self._alterations.used(name)
            if used:
                # By a look at what is there: this process may have created a topic of that name since.
                self._deleted.update((spec.topic_id, spec) for spec in self._definitions.gone(used))

    def _end_watch(self) -> None:
        self._definitions.unfollow()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
