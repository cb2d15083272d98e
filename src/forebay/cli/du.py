"""`forebay du`: how many bytes each topic takes, tier by tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forebay.cli.commands import command, root
from forebay.cli.invocation import Invocation
from forebay.cli.options import AsJson, OneTopic
from forebay.cli.terminal import readable_bytes, say_json, say_table
from forebay.errors import UnknownTopic

if TYPE_CHECKING:
    from forebay.storage.usage import TierUsage
    from forebay.wire.messages import UsageItem


@command(root, "du", examples=["forebay du", "forebay du shop/orders --json"], by_url=True)
def du(run: Invocation, *, name: OneTopic = None, as_json: AsJson = False) -> None:
    """Say how many bytes each topic takes: in log files, sealed files, objects in the store, and set aside.

    Changes nothing. Topics on engine rocksdb share one database, which is counted as a whole; those in memory take no
    bytes on disk. Copies of one record in two tiers count in both.
    """
    found = _local(run, name) if run.url is None else _asked(run.url, name)
    if as_json:
        for one in found:
            say_json({"topic": one.topic, "tier": one.tier, "files": one.files, "bytes": one.bytes})
        return
    rows = [(one.topic or "(rocksdb)", one.tier, one.files, readable_bytes(one.bytes)) for one in found]
    total = sum(one.bytes for one in found)
    say_table(("topic", "tier", "files", "size"), [*rows, ("total", "", "", readable_bytes(total))])


def _local(run: Invocation, name: str | None) -> Sequence[TierUsage]:
    from forebay.cli.directory import database_of, look_at, pieces_of
    from forebay.storage.usage import UsageSum
    from forebay.topics import Engine, TopicName

    found = look_at(run)
    wanted = TopicName.parse(name) if name is not None else None
    if wanted is not None and all(spec.name != wanted for spec in found.topics):
        raise UnknownTopic(f'there is no topic {wanted}: see "forebay topic list" for what there is', topic=wanted)
    sums = UsageSum()
    for place in found.places():
        assert place.spec is not None
        if wanted in (None, place.spec.name):
            sums.add(str(place.spec.name), pieces_of(found, place, run.disk))
    if any(spec.engine is Engine.ROCKSDB for spec in found.topics if wanted in (None, spec.name)):
        sums.add_database(run.disk, database_of(found))
    return sums.sums()


def _asked(url: str, name: str | None) -> Sequence[UsageItem]:
    from forebay.cli.brokers import BrokerCalls
    from forebay.client.transport import HttpCall
    from forebay.topics import TopicName
    from forebay.wire.messages import UsageList

    query = {} if name is None else {"topic": str(TopicName.parse(name))}
    with BrokerCalls.reached(url) as calls:
        return calls.ask(HttpCall(method="GET", path="/v1/usage", query=query), UsageList).usage
