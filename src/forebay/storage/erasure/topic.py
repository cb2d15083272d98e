"""Erasing a key in a topic: deleted in every partition, then rewritten if that is asked for, then looked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from forebay.arguments import checked_lookup_key
from forebay.engines import OwnedShard
from forebay.errors import Corrupt, ForebayError, Unavailable, UnsupportedFormat
from forebay.format.metadata.keys import routers_prefix
from forebay.format.metadata.value import decode_value
from forebay.metadata import MetadataStore
from forebay.routing import RouterSpec
from forebay.storage.erasure.answer import CopyPlace, Erasure, ErasureCommands, Remnant, ShardErasure
from forebay.storage.topic import Topic
from forebay.topics import SubscriptionSpec, TopicName

ELSEWHERE = "elsewhere"


def erase(topic: Topic, key: bytes, *, now: bool, erasure_of: Callable[[OwnedShard], ShardErasure]) -> Erasure:
    """Delete every record with the key in the partitions that this process has or may have; see `Storage.erase_key`.

    A partition that it may not have is named as remaining; `Unavailable` (`Moved`) if that is so for all of them.
    """
    commands, wanted = ErasureCommands(topic.spec.name, checked_lookup_key(key)), checked_lookup_key(key)
    refused = {number: error for number in range(topic.partitions) if (error := topic.refusal(number)) is not None}
    if len(refused) == topic.partitions:
        raise next(iter(refused.values()))
    # One after the other, and each deleted before any is rewritten: readers lose them as soon as can be.
    owned = [number for number in range(topic.partitions) if number not in refused]
    deleted = sum(topic.delete_by_key(wanted, partition=number) for number in owned)
    remains = [_elsewhere(number, error, commands) for number, error in refused.items()]
    for number in owned:
        remains += topic.ask_owned(number, lambda shard: _remains(erasure_of(shard), wanted, now=now))
    # Partitions may lie in one place.
    by_place = {(remnant.tier, remnant.place): remnant for remnant in reversed(remains)}
    return Erasure(topic=topic.name, deleted=deleted, remains=tuple(reversed(by_place.values())), copies=())


def _remains(erasure: ShardErasure, key: bytes, *, now: bool) -> list[Remnant]:
    if now:
        erasure.rewrite(key)
    return erasure.remains(key)


def _elsewhere(partition: int, error: ForebayError, commands: ErasureCommands) -> Remnant:
    """A partition whose records only another process can delete."""
    return Remnant(
        partition=partition,
        tier=ELSEWHERE,
        place=str(error),
        bytes=0,
        until="the key is erased there",
        command=commands.rewrite,
    )


def copies_of(
    topic: TopicName,
    key: bytes,
    metadata: MetadataStore,
    prefix: str,
    subscriptions: Callable[[str], Sequence[SubscriptionSpec]],
) -> tuple[CopyPlace, ...]:
    """The topics that records of this one are sent on to, also by way of others: by routers, and as dead letters.

    `subscriptions` gives those of a topic by its name; none if there is no such topic any more.
    """
    routers = list(_routers(metadata, prefix))
    commands, found, waiting = ErasureCommands(topic, key), dict[str, CopyPlace](), [str(topic)]
    while waiting:
        source = waiting.pop()
        ways = [(one.destination, f"router {one.name}") for one in routers if _reads(one, source)]
        ways += [
            (one.dead_letter_topic, f"dead letters of subscription {one.name} of {source}")
            for one in subscriptions(source)
            if one.dead_letter_topic is not None
        ]
        for target, by in ways:
            if target not in found and target != str(topic):
                found[target] = CopyPlace(topic=target, by=by, command=commands.erase(target))
                waiting.append(target)
    return tuple(found.values())


def _reads(router: RouterSpec, topic: str) -> bool:
    return any(source.topic == topic for source in router.sources)


def _routers(metadata: MetadataStore, prefix: str) -> Iterator[RouterSpec]:
    for entry in metadata.range(routers_prefix(prefix=prefix)):
        try:
            yield decode_value(entry.value, RouterSpec)[0]
        except (Corrupt, UnsupportedFormat) as error:
            raise Unavailable(
                f"where copies are is not known: the router at {entry.key} cannot be read ({error})"
            ) from error
