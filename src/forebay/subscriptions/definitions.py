"""Where subscriptions are defined: one value per subscription in the metadata store, made together with its cursors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import msgspec

from forebay.catalog.transact import Done, Write, transact
from forebay.clock import Clock
from forebay.errors import Conflict, Corrupt, Invalid, UnknownTopic, UnsupportedFormat
from forebay.format.metadata.keys import (
    progress_key,
    subscribed_key,
    subscription_key,
    subscriptions_prefix,
    topic_key,
)
from forebay.format.metadata.value import Unknown, decode_value, encode_value
from forebay.metadata import Delete, Entry, MetadataStore, Put, RevisionIs
from forebay.progress import Progress, ReaderName
from forebay.topics import SubscriptionSpec, TopicDispatch, TopicSpec

logger = logging.getLogger(__name__)

CURSORS_MAX: Final = 90
"""Cursors made in one transaction; each is compared too."""


class _Stored(NamedTuple):
    spec: SubscriptionSpec
    unknown: Unknown
    revision: int


class _Found(NamedTuple):
    """What a creation finds."""

    stored: _Stored | None
    topic: Entry | None
    cursors: dict[str, Entry | None]
    changed: Entry | None


class SubscriptionChange(msgspec.Struct, frozen=True, kw_only=True):
    """What lies at the key that changes with every subscription that is created or changed."""

    changed_by: str


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

    def create(
        self,
        wanted: SubscriptionSpec,
        cursors: Mapping[int, Progress],
        dispatch: TopicDispatch = TopicDispatch.RELIABLE,
    ) -> SubscriptionSpec:
        """Define a subscription whose cursors stand here; the one that is there, if there is one already.

        A cursor that a reader or group of its name has already stays where it is. The definition is written with the
        last of the cursors: what an interrupted creation has left is gone on with by the next. `Conflict` if the topic
        does not have this `dispatch` any more.
        """
        pending = list(cursors.items())
        for first in range(0, max(1, len(pending)), CURSORS_MAX):
            is_last = first + CURSORS_MAX >= len(pending)
            found = self._create(wanted, dict(pending[first : first + CURSORS_MAX]), dispatch, is_last=is_last)
            if found is not None:
                return found
        return wanted

    def check_no_circle(self, wanted: SubscriptionSpec) -> None:
        """`Invalid` if spent records of this subscription could come back by the dead letters of others."""
        origin = f"{wanted.namespace}/{wanted.topic}"
        way = {wanted.dead_letter_topic: origin}
        pending = [wanted.dead_letter_topic]
        while pending:
            topic = pending.pop()
            if topic is None:
                continue
            prefix = subscriptions_prefix(*topic.split("/"), prefix=self._prefix)
            for entry in self._metadata.range(prefix):
                spec = decode_value(entry.value, SubscriptionSpec)[0]
                to = spec.dead_letter_topic
                if to == origin:
                    raise Invalid(
                        f"spent records of {origin} would go in a circle: {wanted.name} sends them to "
                        f"{wanted.dead_letter_topic}, and the subscription {spec.name} of {topic} sends its own to "
                        f"{origin}; choose another dead_letter_topic"
                    )
                if to is not None and to not in way:
                    way[to] = topic
                    pending.append(to)

    def none_of(self, topic: TopicSpec) -> list[RevisionIs]:
        """`Conflict` if a topic has subscriptions. What a transaction compares that must find none."""
        key = subscribed_key(prefix=self._prefix)
        # Before the look at the subscriptions: one that is created after it changes this key.
        entry = self._metadata.get(key)
        found = self.of_topic(topic)
        if found:
            raise Conflict(
                f"{topic.name} has subscriptions ({', '.join(spec.name for spec in found[:5])}), and its dispatch "
                "cannot change while it has: delete them first, and subscribe again",
                topic=topic.name,
            )
        return [RevisionIs(key, _revision(entry))]

    def current(self, spec: SubscriptionSpec) -> SubscriptionSpec:
        """The definition as it is now. `Conflict` if the subscription was deleted, also if there is another by now."""
        return _current(spec, self._stored(self._key(_name(spec)))).spec

    def change(
        self, spec: SubscriptionSpec, changed: Callable[[SubscriptionSpec], SubscriptionSpec]
    ) -> SubscriptionSpec:
        """Change a definition; as it is on return. `Conflict` if the subscription was deleted."""
        key, subscribed = self._key(_name(spec)), subscribed_key(prefix=self._prefix)

        def read() -> tuple[Entry | None, _Stored | None]:
            # In this order: a subscription that is stored after the look at `subscribed` changes it.
            return self._metadata.get(subscribed), self._stored(key)

        def change(
            found: tuple[Entry | None, _Stored | None],
        ) -> Write[SubscriptionSpec] | Done[SubscriptionSpec]:
            stored = _current(spec, found[1])
            wanted = changed(stored.spec)
            if wanted == stored.spec:
                return Done(wanted)
            compares = [RevisionIs(key, stored.revision)]
            if wanted.dead_letter_topic not in (None, stored.spec.dead_letter_topic):
                self.check_no_circle(wanted)
                compares.append(RevisionIs(subscribed, _revision(found[0])))
            drawn = SubscriptionChange(changed_by=spec.subscription_id)
            puts = [Put(key, encode_value(wanted, unknown=stored.unknown)), Put(subscribed, encode_value(drawn))]
            return Write(compares, puts, wanted)

        what = f"the subscription {spec.name} of {spec.namespace}/{spec.topic} is not changed"
        return transact(self._metadata, read, change, what=what, clock=self._clock)

    def revision(self) -> int:
        """A number that is another one after each creation and each change of a subscription of the log."""
        return _revision(self._metadata.get(subscribed_key(prefix=self._prefix)))

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
        self,
        wanted: SubscriptionSpec,
        cursors: Mapping[int, Progress],
        dispatch: TopicDispatch,
        *,
        is_last: bool,
    ) -> SubscriptionSpec | None:
        """Write cursors, and with the last of them the definition; another definition that is there already."""
        name = _name(wanted)
        key, topic = self._key(name), topic_key(wanted.namespace, wanted.topic, prefix=self._prefix)
        subscribed = subscribed_key(prefix=self._prefix)
        keys = {
            progress_key(name.namespace, name.topic, name.reader, partition, prefix=self._prefix): progress
            for partition, progress in cursors.items()
        }

        def read() -> _Found:
            # In this order: a subscription that is stored after the look at `changed` changes it.
            changed = self._metadata.get(subscribed)
            stand = {at: self._metadata.get(at) for at in keys}
            return _Found(self._stored(key), self._metadata.get(topic), stand, changed)

        def change(found: _Found) -> Write[SubscriptionSpec | None] | Done[SubscriptionSpec | None]:
            if found.stored is not None and found.stored.spec.topic_id == wanted.topic_id:
                return Done(found.stored.spec)
            compares = [
                RevisionIs(key, found.stored.revision if found.stored is not None else 0),
                RevisionIs(topic, _defined(found.topic, wanted, dispatch)),
                *(RevisionIs(at, _revision(entry)) for at, entry in found.cursors.items()),
            ]
            puts = [Put(at, encode_value(keys[at])) for at, entry in found.cursors.items() if not _is_of(entry, wanted)]
            if is_last:
                drawn = SubscriptionChange(changed_by=wanted.subscription_id)
                puts += [Put(key, encode_value(wanted)), Put(subscribed, encode_value(drawn))]
                if wanted.dead_letter_topic is not None:
                    self.check_no_circle(wanted)
                    compares.append(RevisionIs(subscribed, _revision(found.changed)))
            # Commit point: with the last cursors the subscription is there, and starts where they stand.
            return Write(compares, puts, None) if puts else Done(None)

        what = f"the subscription {wanted.name} of {wanted.namespace}/{wanted.topic} is not created"
        return transact(self._metadata, read, change, what=what, clock=self._clock)

    def _stored(self, key: str) -> _Stored | None:
        entry = self._metadata.get(key)
        return None if entry is None else _Stored(*decode_value(entry.value, SubscriptionSpec), entry.mod_revision)

    def _key(self, name: ReaderName) -> str:
        return subscription_key(name.namespace, name.topic, name.reader, prefix=self._prefix)


def _revision(entry: Entry | None) -> int:
    return 0 if entry is None else entry.mod_revision


def _defined(entry: Entry | None, wanted: SubscriptionSpec, dispatch: TopicDispatch) -> int:
    """The revision of a topic's definition, if it is the topic that is to be subscribed to."""
    name = f"{wanted.namespace}/{wanted.topic}"
    topic = None if entry is None else decode_value(entry.value, TopicSpec)[0]
    if entry is None or topic is None or topic.topic_id != wanted.topic_id:
        raise UnknownTopic(f"{name} was deleted: {wanted.name} cannot subscribe to it", topic=name)
    if topic.dispatch is not dispatch:
        raise Conflict(f"{name} was altered to dispatch {topic.dispatch} meanwhile: subscribe again", topic=name)
    return entry.mod_revision


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
