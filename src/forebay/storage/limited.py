"""Opens idle shards of topics with caps, a time to live or key compaction, so that their limits are enforced."""

from __future__ import annotations

import logging
from collections.abc import Callable

from forebay.errors import Closed, ForebayError, Moved, Unavailable, UnknownTopic
from forebay.shard import ShardRef, refs_of
from forebay.storage.building import Parts
from forebay.storage.shards import Shards
from forebay.topics import Engine, TopicSpec

logger = logging.getLogger(__name__)


class Limited:
    """Opens them, each once: from then on they are kept to their limits like any other. Other topics stay closed."""

    def __init__(self, parts: Parts, shards: Shards) -> None:
        self._parts = parts
        self._shards = shards
        self._due: dict[str, TopicSpec] = {}

    def note(self, spec: TopicSpec) -> bool:
        """A definition as it is now; whether its shards are to be looked at. Beside an owner none is."""
        if self._parts.owned is None or spec.engine is Engine.MEMORY or not spec.ends_records:
            self._due.pop(spec.topic_id, None)
            return False
        self._due[spec.topic_id] = spec
        return True

    def open_due(self, is_ended: Callable[[], bool]) -> None:
        """Open what is due and lies here; what cannot be opened for now stays due."""
        for topic_id, spec in list(self._due.items()):
            is_done = True
            for ref in refs_of(spec):
                if is_ended():
                    return
                is_done = self._is_seen_to(ref) and is_done
            if is_done and self._due.get(topic_id) is spec:
                # Gone already where somebody has just altered it.
                self._due.pop(topic_id, None)

    def _is_seen_to(self, ref: ShardRef) -> bool:
        try:
            if self._shards.find(ref) is None and self.was_here(ref):
                self._shards.ours(ref)
        except (Closed, Moved, UnknownTopic):
            return True
        except (ForebayError, OSError) as error:
            logger.warning("%s: its limits are not applied while it cannot be opened: %s", ref, error)
            return not isinstance(error, Unavailable | OSError)
        return True

    def was_here(self, ref: ShardRef) -> bool:
        """Whether this directory had the shard last, so that opening it here takes it from no other."""
        engine = self._parts.rocksdb if ref.spec.engine is Engine.ROCKSDB else self._parts.owned
        return engine is not None and engine.was_here(ref)
