"""Where subscriptions are defined: one value per subscription in the metadata store, made together with its cursors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import msgspec

from forebay.catalog.entries import decode_entry, read_or_log, readable, refused
from forebay.catalog.transact import Done, Write, transact
from forebay.clock import Clock
from forebay.errors import Conflict, Invalid, UnknownTopic
from forebay.format.metadata.keys import (
    letter_key,
    progress_key,
    routers_prefix,
    routes_key,
    subscribed_key,
    subscription_key,
    subscriptions_prefix,
    topic_key,
)
from forebay.format.metadata.value import Unknown, encode_value
from forebay.metadata import Absent, Delete, Entry, MetadataStore, Put, RevisionIs
from forebay.progress import Progress, ReaderName
from forebay.routing import RouterSpec
from forebay.topics import SubscriptionSpec, TopicDispatch, TopicSpec

logger = logging.getLogger(__name__)

CURSORS_MAX: Final = 90
"""Cursors made in one transaction; each is compared too."""
SECRET_BYTES: Final = 32


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
    routes: Entry | None


class SubscriptionChange(msgspec.Struct, frozen=True, kw_only=True):
    """What lies at the key that changes with every subscription that is created or changed."""

    changed_by: str


class LetterSecret(msgspec.Struct, frozen=True, kw_only=True):
    """By what dead letters are sealed. Drawn once for all processes that share the metadata store."""

    secret: bytes


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

    def letter_secret(self) -> bytes | None:
        """By what dead letters are sealed; `None` before the first one."""
        entry = self._metadata.get(letter_key(prefix=self._prefix))
        return None if entry is None else decode_entry(entry, LetterSecret)[0].secret

    def make_letter_secret(self) -> bytes:
        """By what dead letters are sealed; drawn if there is nothing yet. Of several processes one draws it."""
        key = letter_key(prefix=self._prefix)
        drawn = LetterSecret(secret=self._clock.random_bytes(SECRET_BYTES))

        def change(entry: Entry | None) -> Write[bytes] | Done[bytes]:
            if entry is not None:
                return Done(decode_entry(entry, LetterSecret)[0].secret)
            return Write([RevisionIs(key, 0)], [Put(key, encode_value(drawn))], drawn.secret)

        what = "the secret that seals dead letters is not stored"
        return transact(self._metadata, lambda: self._metadata.get(key), change, what=what, clock=self._clock)

    def of_topic(self, topic: TopicSpec) -> list[SubscriptionSpec]:
        """Every subscription of a topic, by name; those that cannot be read are logged and left out."""
        prefix = subscriptions_prefix(topic.namespace, topic.topic, prefix=self._prefix)
        found = readable(self._metadata.range(prefix), SubscriptionSpec)
        return [spec for _, spec in found if spec.topic_id == topic.topic_id and not spec.is_ending]

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
        if len(pending) <= CURSORS_MAX:
            # All come with the definition, and so are of this very subscription.
            own = {"subscription": wanted.subscription_id}
            pending = [(number, msgspec.structs.replace(progress, **own)) for number, progress in pending]
        for first in range(0, max(1, len(pending)), CURSORS_MAX):
            is_last = first + CURSORS_MAX >= len(pending)
            found = self._create(wanted, dict(pending[first : first + CURSORS_MAX]), dispatch, is_last=is_last)
            if found is not None:
                return found
        return wanted

    def check_no_circle(self, wanted: SubscriptionSpec) -> None:
        """`Invalid` if spent records of this subscription could come back, by dead letters of others or routers."""
        origin = f"{wanted.namespace}/{wanted.topic}"
        routers = [
            router for _, router in readable(self._metadata.range(routers_prefix(prefix=self._prefix)), RouterSpec)
        ]
        way = {wanted.dead_letter_topic: origin}
        pending = [wanted.dead_letter_topic]
        while pending:
            topic = pending.pop()
            if topic is None:
                continue
            prefix = subscriptions_prefix(*topic.split("/"), prefix=self._prefix)
            specs = [decode_entry(entry, SubscriptionSpec)[0] for entry in self._metadata.range(prefix)]
            onward = [
                (spec.dead_letter_topic, f"the subscription {spec.name} of {topic} sends its own") for spec in specs
            ]
            onward += [
                (router.destination, f"the router {router.name} moves records of {topic}")
                for router in routers
                if any(source.topic == topic for source in router.sources)
            ]
            for to, how in onward:
                if to == origin:
                    raise Invalid(
                        f"spent records of {origin} would go in a circle: {wanted.name} sends them to "
                        f"{wanted.dead_letter_topic}, and {how} to {origin}; choose another dead_letter_topic"
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
        """The definition as it is now. `Conflict` if the subscription was deleted, also if there is another by now.

        So it is while the subscription is being deleted: its cursors are removed one after the other.
        """
        return _current(spec, self._stored(self._key(_name(spec)))).spec

    def change(
        self, spec: SubscriptionSpec, changed: Callable[[SubscriptionSpec], SubscriptionSpec]
    ) -> SubscriptionSpec:
        """Change a definition; as it is on return. `Conflict` if the subscription was deleted, or is being deleted."""
        return self._change(spec, changed, is_deletion=False)

    def begin_deletion(self, spec: SubscriptionSpec) -> SubscriptionSpec:
        """Mark a subscription as ending, also one that is marked already; as it is on return.

        `Conflict` if it was deleted. From here on no caller can use it, and any process may go on with its deletion.
        """
        return self._change(spec, lambda found: msgspec.structs.replace(found, is_ending=True), is_deletion=True)

    def _change(
        self,
        spec: SubscriptionSpec,
        changed: Callable[[SubscriptionSpec], SubscriptionSpec],
        *,
        is_deletion: bool,
    ) -> SubscriptionSpec:
        key, subscribed = self._key(_name(spec)), subscribed_key(prefix=self._prefix)
        routes = routes_key(prefix=self._prefix)

        def read() -> tuple[Entry | None, Entry | None, _Stored | None]:
            # In this order: what is stored after the look at `subscribed` and `routes` changes one of them.
            return self._metadata.get(subscribed), self._metadata.get(routes), self._stored(key)

        def change(
            found: tuple[Entry | None, Entry | None, _Stored | None],
        ) -> Write[SubscriptionSpec] | Done[SubscriptionSpec]:
            stored = _stored_of(spec, found[2]) if is_deletion else _current(spec, found[2])
            wanted = changed(stored.spec)
            if wanted == stored.spec:
                return Done(wanted)
            compares = [RevisionIs(key, stored.revision)]
            if wanted.dead_letter_topic not in (None, stored.spec.dead_letter_topic):
                self.check_no_circle(wanted)
                compares += [RevisionIs(subscribed, _revision(found[0])), RevisionIs(routes, _revision(found[1]))]
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

    def unreadable(self, name: ReaderName) -> Entry | None:
        """The definition of this name as it is stored, if it cannot be read."""
        entry = self._metadata.get(self._key(name))
        return entry if entry is not None and refused(entry, SubscriptionSpec) is not None else None

    def remove_unreadable(self, entry: Entry) -> None:
        """Remove a definition that cannot be read; `Conflict` if it is another one by now."""
        if not self._metadata.transaction([RevisionIs(entry.key, entry.mod_revision)], [Delete(entry.key)]).succeeded:
            raise Conflict(f"{entry.key} was changed at the same time: look at it again before deleting it")

    def forget_topic(self, topic: TopicSpec) -> None:
        """Remove every subscription of a topic that was deleted; those of a later one of its name stay.

        One that cannot be read goes as well, unless there is a later topic.
        """
        no_later = Absent(topic_key(topic.namespace, topic.topic, prefix=self._prefix))
        prefix = subscriptions_prefix(topic.namespace, topic.topic, prefix=self._prefix)
        for entry in self._metadata.range(prefix):
            found = read_or_log(entry, SubscriptionSpec)
            if found is None:
                unchanged = RevisionIs(entry.key, entry.mod_revision)
                self._metadata.transaction([unchanged, no_later], [Delete(entry.key)])
            elif found[0].topic_id == topic.topic_id:
                self.remove(found[0])

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
        subscribed, routes = subscribed_key(prefix=self._prefix), routes_key(prefix=self._prefix)
        keys = {
            progress_key(name.namespace, name.topic, name.reader, partition, prefix=self._prefix): progress
            for partition, progress in cursors.items()
        }

        def read() -> _Found:
            # In this order: a subscription or router that is stored after these looks changes one of them.
            changed, routed = self._metadata.get(subscribed), self._metadata.get(routes)
            stand = {at: self._metadata.get(at) for at in keys}
            return _Found(self._stored(key), self._metadata.get(topic), stand, changed, routed)

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
                    compares.append(RevisionIs(routes, _revision(found.routes)))
            # Commit point: with the last cursors the subscription is there, and starts where they stand.
            return Write(compares, puts, None) if puts else Done(None)

        what = f"the subscription {wanted.name} of {wanted.namespace}/{wanted.topic} is not created"
        return transact(self._metadata, read, change, what=what, clock=self._clock)

    def _stored(self, key: str) -> _Stored | None:
        entry = self._metadata.get(key)
        return None if entry is None else _Stored(*decode_entry(entry, SubscriptionSpec), entry.mod_revision)

    def _key(self, name: ReaderName) -> str:
        return subscription_key(name.namespace, name.topic, name.reader, prefix=self._prefix)


def _revision(entry: Entry | None) -> int:
    return 0 if entry is None else entry.mod_revision


def _defined(entry: Entry | None, wanted: SubscriptionSpec, dispatch: TopicDispatch) -> int:
    """The revision of a topic's definition, if it is the topic that is to be subscribed to."""
    name = f"{wanted.namespace}/{wanted.topic}"
    topic = None if entry is None else decode_entry(entry, TopicSpec)[0]
    if entry is None or topic is None or topic.topic_id != wanted.topic_id:
        raise UnknownTopic(f"{name} was deleted: {wanted.name} cannot subscribe to it", topic=name)
    if topic.dispatch is not dispatch:
        raise Conflict(f"{name} was altered to dispatch {topic.dispatch} meanwhile: subscribe again", topic=name)
    return entry.mod_revision


def _is_of(entry: Entry | None, wanted: SubscriptionSpec) -> bool:
    """Whether a reader of this name has a cursor in this very topic already; not a subscription that was deleted."""
    if entry is None:
        return False
    progress = decode_entry(entry, Progress)[0]
    return progress.incarnation == wanted.topic_id and progress.is_of(wanted.subscription_id)


def _name(spec: SubscriptionSpec) -> ReaderName:
    return ReaderName(spec.namespace, spec.topic, spec.name)


def _current(spec: SubscriptionSpec, stored: _Stored | None) -> _Stored:
    """What is stored, if it is this very subscription and it is not being deleted; else `Conflict`."""
    found = _stored_of(spec, stored)
    if found.spec.is_ending:
        topic = f"{spec.namespace}/{spec.topic}"
        raise Conflict(f"the subscription {spec.name} of {topic} is being deleted: subscribe again", topic=topic)
    return found


def _stored_of(spec: SubscriptionSpec, stored: _Stored | None) -> _Stored:
    """What is stored, if it is this very subscription, also one that is being deleted; else `Conflict`."""
    if stored is None or stored.spec.subscription_id != spec.subscription_id:
        raise Conflict(
            f"the subscription {spec.name} of {spec.namespace}/{spec.topic} was deleted: subscribe again",
            topic=f"{spec.namespace}/{spec.topic}",
        )
    return stored
