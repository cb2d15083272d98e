"""Keys of the metadata store: one function per kind of key. Knows no store and no values.

Names of topics and subscriptions were parsed before and hold no "/". Offsets are padded to 20
digits, so that keys sort like offsets. A prefix that ends in "/" holds exactly the keys below it.
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "/forebay"


def topic_key(namespace: str, topic: str, *, prefix: str = PREFIX) -> str:
    """The definition of a topic."""
    return f"{prefix}/topics/{namespace}/{topic}"


def topics_prefix(namespace: str | None = None, *, prefix: str = PREFIX) -> str:
    """All topics, or those of one namespace."""
    return f"{prefix}/topics/" if namespace is None else f"{prefix}/topics/{namespace}/"


def deleted_key(topic_id: str, *, prefix: str = PREFIX) -> str:
    """The note that a topic is being deleted."""
    return f"{prefix}/deleted/{topic_id}"


def deletions_prefix(*, prefix: str = PREFIX) -> str:
    """The notes on all topics that are being deleted."""
    return f"{prefix}/deleted/"


def late_key(topic_id: str, *, prefix: str = PREFIX) -> str:
    """The note that objects of a deleted topic are to be looked for once more."""
    return f"{prefix}/late/{topic_id}"


def all_shards_prefix(*, prefix: str = PREFIX) -> str:
    """Everything stored about the shards of all topics."""
    return f"{prefix}/storage/topics/"


def shards_prefix(namespace: str, topic: str, *, prefix: str = PREFIX) -> str:
    """Everything stored about the shards of one topic."""
    return f"{prefix}/storage/topics/{namespace}/{topic}/"


def shard_prefix(namespace: str, topic: str, partition: int, *, prefix: str = PREFIX) -> str:
    """Everything stored about one shard."""
    return f"{shards_prefix(namespace, topic, prefix=prefix)}{partition}/"


def state_key(namespace: str, topic: str, partition: int, *, prefix: str = PREFIX) -> str:
    """The state of a shard."""
    return f"{shard_prefix(namespace, topic, partition, prefix=prefix)}state"


def prefix_of_state(key: str) -> str:
    """The prefix that the key of a shard's state was made with."""
    return key.rpartition("/storage/topics/")[0]


def shard_of_state(key: str) -> str:
    """The shard that a state is of, as messages name it: `namespace/topic[partition]`."""
    namespace, topic, partition, _ = key.rpartition("/storage/topics/")[2].split("/")
    return f"{namespace}/{topic}[{partition}]"


def directory_key(directory_id: str, *, prefix: str = PREFIX) -> str:
    """Where a data directory lies."""
    return f"{prefix}/directories/{directory_id}"


def segments_prefix(namespace: str, topic: str, partition: int, *, prefix: str = PREFIX) -> str:
    """The descriptors of a shard's history, and `cur`, which sorts behind them."""
    return f"{shard_prefix(namespace, topic, partition, prefix=prefix)}segments/"


def segment_key(namespace: str, topic: str, partition: int, start: int, *, prefix: str = PREFIX) -> str:
    """The descriptor of the segment that starts at this offset."""
    return f"{segments_prefix(namespace, topic, partition, prefix=prefix)}{start:020d}"


def cur_key(namespace: str, topic: str, partition: int, *, prefix: str = PREFIX) -> str:
    """The end of a shard's history."""
    return f"{segments_prefix(namespace, topic, partition, prefix=prefix)}cur"


def deletes_prefix(namespace: str, topic: str, partition: int, *, prefix: str = PREFIX) -> str:
    """The deletion vectors of a shard."""
    return f"{shard_prefix(namespace, topic, partition, prefix=prefix)}deletes/"


def deletes_key(namespace: str, topic: str, partition: int, start: int, *, prefix: str = PREFIX) -> str:
    """The deletion vector of the window that starts at this offset."""
    return f"{deletes_prefix(namespace, topic, partition, prefix=prefix)}{start:020d}"


def all_progress_prefix(*, prefix: str = PREFIX) -> str:
    """The cursors of all subscriptions and groups."""
    return f"{prefix}/progress/"


def progress_key(namespace: str, topic: str, reader: str, partition: int, *, prefix: str = PREFIX) -> str:
    """The cursor of a subscription or group."""
    return f"{prefix}/progress/{namespace}/{topic}/{reader}/{partition}"


def all_subscriptions_prefix(*, prefix: str = PREFIX) -> str:
    """The definitions of the subscriptions of all topics."""
    return f"{prefix}/subscriptions/"


def subscriptions_prefix(namespace: str, topic: str, *, prefix: str = PREFIX) -> str:
    """The definitions of all subscriptions of a topic."""
    return f"{prefix}/subscriptions/{namespace}/{topic}/"


def subscription_key(namespace: str, topic: str, name: str, *, prefix: str = PREFIX) -> str:
    """The definition of a subscription."""
    return f"{subscriptions_prefix(namespace, topic, prefix=prefix)}{name}"


def subscribed_key(*, prefix: str = PREFIX) -> str:
    """Changes with every subscription that is created: for transactions that must find none, or no circle."""
    return f"{prefix}/subscribed"


def letter_key(*, prefix: str = PREFIX) -> str:
    """The secret by which dead letters are sealed."""
    return f"{prefix}/letters"


def load_key(load_id: str, *, prefix: str = PREFIX) -> str:
    """A bulk load."""
    return f"{prefix}/loads/{load_id}"


def offers_prefix(load_id: str | None = None, *, prefix: str = PREFIX) -> str:
    """What is noted of bulk loads that are not over yet, or of one of them."""
    return f"{prefix}/offers/" if load_id is None else f"{prefix}/offers/{load_id}/"


def offer_key(load_id: str, *, prefix: str = PREFIX) -> str:
    """The note that a bulk load is not over yet."""
    return f"{offers_prefix(load_id, prefix=prefix)}load"


def attached_key(load_id: str, partition: int, *, prefix: str = PREFIX) -> str:
    """Where the part of a bulk load for one partition was attached, while the load is not over."""
    return f"{offers_prefix(load_id, prefix=prefix)}{partition:06d}"


def sink_key(query_id: str, namespace: str, topic: str, *, prefix: str = PREFIX) -> str:
    """The last batch that a streaming query wrote into a topic."""
    return f"{prefix}/sinks/{query_id}/{namespace}/{topic}"


def tables_key(namespace: str, topic: str, *, prefix: str = PREFIX) -> str:
    """The objects of a topic that snapshots of tables name."""
    return f"{prefix}/tables/{namespace}/{topic}"


def compactor_key(namespace: str, topic: str, partition: int, *, prefix: str = PREFIX) -> str:
    """The lease of the process that compacts the history of a shard."""
    return f"{prefix}/compactors/{namespace}/{topic}/{partition}"


def registrar_key(namespace: str, topic: str, *, prefix: str = PREFIX) -> str:
    """The lease of the process that registers the history of a topic as a table."""
    return f"{prefix}/registrars/{namespace}/{topic}"


def lake_key(namespace: str, topic: str, *, prefix: str = PREFIX) -> str:
    """The lease of the process that brings a topic into a table."""
    return f"{prefix}/lakes/{namespace}/{topic}"


def backfill_key(backfill_id: str, topic_id: str, *, prefix: str = PREFIX) -> str:
    """What a backfill into a topic brings, so that its id is never used for something else."""
    return f"{prefix}/backfills/{topic_id}/{backfill_id}"


def tokens_prefix(*, prefix: str = PREFIX) -> str:
    """All tokens of callers of a server."""
    return f"{prefix}/tokens/"


def token_key(token_id: str, *, prefix: str = PREFIX) -> str:
    """A token of a caller of a server."""
    return f"{tokens_prefix(prefix=prefix)}{token_id}"


def routers_prefix(*, prefix: str = PREFIX) -> str:
    """All routers."""
    return f"{prefix}/routers/"


def router_key(name: str, *, prefix: str = PREFIX) -> str:
    """The definition of a router."""
    return f"{routers_prefix(prefix=prefix)}{name}"


def routes_key(*, prefix: str = PREFIX) -> str:
    """Changes with every router, so that two that are created at once cannot close a circle."""
    return f"{prefix}/routes"
