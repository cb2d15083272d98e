"""What a deleted topic leaves is removed from every tier: files, objects, keys, cursors. Every step may be repeated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from forebay.cleanup.deleted_topics import forget_shard, mark_deleting
from forebay.clock import Clock
from forebay.engines.operations import wanted
from forebay.errors import ForebayError, Unavailable
from forebay.format.descriptor import ShardState
from forebay.loads.book import LoadBook
from forebay.progress import ProgressStore
from forebay.settings import Settings
from forebay.shard import ShardRef, refs_of
from forebay.storage.building import Parts
from forebay.storage.definitions import Definitions, LateObjects
from forebay.topics import Engine, TopicSpec

logger = logging.getLogger(__name__)


class Deletions:
    """Finishes deletions that were begun, here or by a process that died over it."""

    def __init__(
        self,
        parts: Parts,
        definitions: Definitions,
        settings: Settings,
        clock: Clock,
        drop: Callable[[ShardRef], bool],
        forget_topic: Callable[[TopicSpec], None],
    ) -> None:
        self._parts = parts
        self._definitions = definitions
        self._settings = settings
        self._clock = clock
        self._drop = drop
        """Has no more work on a shard begin; whether none is under way. Does not wait."""
        self._forget_topic = forget_topic
        """Drops what this process keeps by the topic's id or name."""

    def finish(self) -> list[TopicSpec]:
        """Remove what deleted topics left. What cannot be removed now is logged and tried again later.

        The topics of which something is left are returned.
        """
        left = []
        for spec in self._definitions.deleting():
            try:
                self._finish(spec)
            except (OSError, ForebayError) as error:
                logger.warning("%s is deleted, but not all of it could be removed yet: %s", spec.name, error)
                left.append(spec)
        return left

    def sweep_late(self) -> None:
        """Remove objects of deleted topics that landed late, once their grace is over."""
        places, cleanup = self._parts.places, self._parts.cleanup
        if places is None or places.store is None or cleanup is None:
            return
        for late in self._definitions.late_objects():
            if late.swept_from and late.swept_from <= self._clock.now_ms():
                places.check_begun()
                cleanup.clear_topic(late.topic_id, late.partitions)
                self._definitions.late_swept(late)

    def _finish(self, spec: TopicSpec) -> None:
        metadata = self._parts.metadata
        refs = refs_of(spec)
        keys = [wanted(ref, self._settings).key for ref in refs]
        store = self._parts.places.store if self._parts.places is not None else None
        states = []
        for ref, key in zip(refs, keys, strict=True):
            # First, so that no owner anywhere can add to what is being removed.
            states.append(mark_deleting(metadata, key, spec.topic_id))
            if not self._drop(ref):
                raise Unavailable(f"{ref} is still worked on in the background")
        # Before what tells it is gone.
        late = self._late(spec, [state for state in states if state is not None], has_store=store is not None)
        if late is not None:
            self._definitions.note_late(late)
        for ref in refs:
            self._parts.engine_of(spec).delete_shard(ref)
        if self._parts.cleanup is not None and spec.engine is Engine.SEGMENT:
            self._parts.cleanup.clear_topic(spec.topic_id, spec.partitions)
        for key in keys:
            forget_shard(metadata, key, spec.topic_id)
        LoadBook(metadata, self._settings.metadata.prefix).forget_topic(spec.topic_id)
        ProgressStore(metadata, self._settings.metadata.prefix).forget_topic(spec.namespace, spec.topic, spec.topic_id)
        noted = {found.topic_id: found for found in self._definitions.late_objects()} if late is None else {}
        self._definitions.end_deletion(spec, late or noted.get(spec.topic_id))
        self._forget_topic(spec)

    def _late(self, spec: TopicSpec, states: Sequence[ShardState], *, has_store: bool) -> LateObjects | None:
        """What may be found later, if anything: an object that was on its way, and files in other directories."""
        holders = set[str]().union(*(state.holders for state in states)) - {self._holder or ""}
        if not (has_store or holders):
            return None
        grace_ms = self._settings.export.orphan_grace_s * 1000
        return LateObjects(
            topic_id=spec.topic_id,
            partitions=spec.partitions,
            # Where this directory knows none, each holder looks into the store that it knows.
            swept_from=self._clock.now_ms() + grace_ms if has_store else 0,
            holders=tuple(sorted(holders)),
        )

    @property
    def _holder(self) -> str | None:
        return self._parts.membership.holder if self._parts.membership is not None else None
