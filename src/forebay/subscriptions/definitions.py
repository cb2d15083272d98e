"""Where subscriptions are defined: one value per subscription in the metadata store, made together with its cursors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from forebay.catalog.transact import Done, Write, transact
from forebay.clock import Clock
from forebay.errors import Conflict, Corrupt, UnknownTopic, UnsupportedFormat
from forebay.format.metadata.keys import progress_key, subscription_key, subscriptions_prefix, topic_key
from forebay.format.metadata.value import Unknown, decode_value, encode_value
from forebay.metadata import Delete, Entry, MetadataStore, Put, RevisionIs
from forebay.progress import Progress, ReaderName
from forebay.topics import SubscriptionSpec, TopicSpec

logger = logging.getLogger(__name__)

CURSORS_MAX: Final = 90
"""Cursors made in one transaction; each is compared too."""


class _Stored(NamedTuple):
    spec: SubscriptionSpec
    unknown: Unknown
    revision: int


class SubscriptionStore:
    """The definitions of subscriptions. Safe for concurrent use by threads and processes; its calls wait."""

    def __init__(self, metadata: MetadataStore, prefix: str, clock: Clock) -> None:
        self._metadata = metadata
        self._prefix = prefix
        self._clock = clock

    def get(self, name: ReaderName, topic_id: str) -> SubscriptionSpec | None:
        """The definition of a subscription, if the topic with this id has it."""
        stored = self._stored(self._key(name))
        return stored.spec if stored is not None and stored.spec.topic_id == topic_id else None

    def of_topic(self, topic: TopicSpec) -> list[SubscriptionSpec]:
        """Every subscription of a topic, by name."""
        prefix = subscriptions_prefix(topic.namespace, topic.topic, prefix=self._prefix)
        found = [decode_value(entry.value, SubscriptionSpec)[0] for entry in self._metadata.range(prefix)]
        return [spec for spec in found if spec.topic_id == topic.topic_id and not spec.is_ending]

    def create(self, wanted: SubscriptionSpec, cursors: Mapping[int, Progress]) -> SubscriptionSpec:
        """Define a subscription whose cursors stand here; the one that is there, if there is one already.

        A cursor that a reader or group of its name has already stays where it is. The definition is written with the
        last of the cursors: what an interrupted creation has left is gone on with by the next.
        """
        pending = list(cursors.items())
        for first in range(0, len(pending), CURSORS_MAX):
            is_last = first + CURSORS_MAX >= len(pending)
            found = self._create(wanted, dict(pending[first : first + CURSORS_MAX]), is_last=is_last)
            if found is not None:
                return found
        return wanted

    def current(self, spec: SubscriptionSpec) -> SubscriptionSpec:
        """The definition as it is now. `Conflict` if the subscription was deleted, also if there is another by now."""
        return _current(spec, self._stored(self._key(_name(spec)))).spec

    def change(
        self, spec: SubscriptionSpec, changed: Callable[[SubscriptionSpec], SubscriptionSpec]
    ) -> SubscriptionSpec:
        """Change a definition; as it is on return. `Conflict` if the subscription was deleted."""
        key = self._key(_name(spec))

        def change(found: _Stored | None) -> Write[SubscriptionSpec] | Done[SubscriptionSpec]:
            stored = _current(spec, found)
            wanted = changed(stored.spec)
            if wanted == stored.spec:
                return Done(wanted)
            put = Put(key, encode_value(wanted, unknown=stored.unknown))
            return Write([RevisionIs(key, stored.revision)], [put], wanted)

        what = f"the subscription {spec.name} of {spec.namespace}/{spec.topic} is not changed"
        return transact(self._metadata, lambda: self._stored(key), change, what=what, clock=self._clock)

    def remove(self, spec: SubscriptionSpec) -> None:
        """Remove the definition of exactly this subscription, if it is still there."""
        key = self._key(_name(spec))

        def change(stored: _Stored | None) -> Write[None] | Done[None]:
            if stored is None or stored.spec.subscription_id != spec.subscription_id:
                return Done(None)
            return Write([RevisionIs(key, stored.revision)], [Delete(key)], None)

        what = f"the subscription {spec.name} of {spec.namespace}/{spec.topic} is not removed"
        transact(self._metadata, lambda: self._stored(key), change, what=what, clock=self._clock)

    def forget_topic(self, topic: TopicSpec) -> None:
        """Remove every subscription of a topic that was deleted; those of a later one of its name stay.

        So does one that cannot be read, which is logged.
        """
        prefix = subscriptions_prefix(topic.namespace, topic.topic, prefix=self._prefix)
        for entry in self._metadata.range(prefix):
            try:
                spec = decode_value(entry.value, SubscriptionSpec)[0]
            except (Corrupt, UnsupportedFormat) as error:
                logger.warning("the subscription at %s stays, though its topic is deleted: %s", entry.key, error)
                continue
            if spec.topic_id == topic.topic_id:
                self.remove(spec)

    def _create(
        self, wanted: SubscriptionSpec, cursors: Mapping[int, Progress], *, is_last: bool
    ) -> SubscriptionSpec | None:
        """Write cursors, and with the last of them the definition; another definition that is there already."""
        name = _name(wanted)
        key, topic = self._key(name), topic_key(wanted.namespace, wanted.topic, prefix=self._prefix)
        keys = {
            progress_key(name.namespace, name.topic, name.reader, partition, prefix=self._prefix): progress
            for partition, progress in cursors.items()
        }

        def read() -> tuple[_Stored | None, Entry | None, dict[str, Entry | None]]:
            return self._stored(key), self._metadata.get(topic), {at: self._metadata.get(at) for at in keys}

        def change(
            found: tuple[_Stored | None, Entry | None, dict[str, Entry | None]],
        ) -> Write[SubscriptionSpec | None] | Done[SubscriptionSpec | None]:
            stored, defined, stand = found
            if stored is not None and stored.spec.topic_id == wanted.topic_id:
                return Done(stored.spec)
            if defined is None or decode_value(defined.value, TopicSpec)[0].topic_id != wanted.topic_id:
                raise UnknownTopic(
                    f"{wanted.namespace}/{wanted.topic} was deleted: {wanted.name} cannot subscribe to it",
                    topic=f"{wanted.namespace}/{wanted.topic}",
                )
            compares = [
                RevisionIs(key, stored.revision if stored is not None else 0),
                RevisionIs(topic, defined.mod_revision),
                *(RevisionIs(at, entry.mod_revision if entry is not None else 0) for at, entry in stand.items()),
            ]
            puts = [Put(at, encode_value(keys[at])) for at, entry in stand.items() if not _is_of(entry, wanted)]
            if is_last:
                puts.append(Put(key, encode_value(wanted)))
            # Commit point: with the last cursors the subscription is there, and starts where they stand.
            return Write(compares, puts, None) if puts else Done(None)

        what = f"the subscription {wanted.name} of {wanted.namespace}/{wanted.topic} is not created"
        return transact(self._metadata, read, change, what=what, clock=self._clock)

    def _stored(self, key: str) -> _Stored | None:
        entry = self._metadata.get(key)
        return None if entry is None else _Stored(*decode_value(entry.value, SubscriptionSpec), entry.mod_revision)

    def _key(self, name: ReaderName) -> str:
        return subscription_key(name.namespace, name.topic, name.reader, prefix=self._prefix)


def _is_of(entry: Entry | None, wanted: SubscriptionSpec) -> bool:
    """Whether a reader of this name has a cursor in this very topic already."""
    return entry is not None and decode_value(entry.value, Progress)[0].incarnation == wanted.topic_id


def _name(spec: SubscriptionSpec) -> ReaderName:
    return ReaderName(spec.namespace, spec.topic, spec.name)


def _current(spec: SubscriptionSpec, stored: _Stored | None) -> _Stored:
    """What is stored, if it is this very subscription; one that is ending may still be ended."""
    if stored is None or stored.spec.subscription_id != spec.subscription_id:
        raise Conflict(
            f"the subscription {spec.name} of {spec.namespace}/{spec.topic} was deleted: subscribe again",
            topic=f"{spec.namespace}/{spec.topic}",
        )
    return stored
