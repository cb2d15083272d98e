"""`forebay topic show`: what a topic is, who has it, and how far each partition and its history go."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.cli.commands import command
from forebay.cli.invocation import Invocation
from forebay.cli.options import AsJson, TopicArgument
from forebay.cli.shard import loss_line, losses_items
from forebay.cli.terminal import readable_bytes, readable_time, say, say_json
from forebay.cli.topic import app
from forebay.errors import Forbidden, ForebayError

if TYPE_CHECKING:
    from forebay.disk import Disk
    from forebay.format.metadata.descriptor import ShardState
    from forebay.inspection import ExpectedShard, Inspected
    from forebay.storage import Storage
    from forebay.surface.blocking import TopicHandle
    from forebay.topics import TopicSpec
    from forebay.wire.messages import PartitionItem


@command(
    app,
    "show",
    examples=["forebay topic show shop/orders", "forebay topic show shop/orders --json"],
    by_url=True,
)
def show(run: Invocation, *, name: TopicArgument, as_json: AsJson = False) -> None:
    """Show a topic: its definition and, per partition, who has it, offsets, history, files and the recovery to come.

    Changes nothing. While another process has the directory open, what that process has published is shown. A broker
    answers for the partitions as it has them open: how each was recovered, and nothing of directories.
    """
    item = _local_item(run, name) if run.url is None else _broker_item(run, run.url, name)
    if as_json:
        say_json(item)
    else:
        _say_topic(item)


def _local_item(run: Invocation, name: str) -> dict[str, Any]:
    from forebay.cli.directory import look_at

    with run.reader() as log:
        spec = log.topic(name).spec if _is_followable(log, name) else _spec(log, name)
        found = look_at(run)
        places = [place for place in found.places() if place.spec == spec]
        item: dict[str, Any] = {**spec_item(spec), "owned": found.owned, "directory": found.path}
        item |= {
            "directory_id": found.id,
            "mode": run.settings.storage.mode,
            "store_failure": _store_failure(run, found),
        }
        item["shards"] = [_shard_item(run, log, found, place) for place in places]
    return item


def _broker_item(run: Invocation, url: str, name: str) -> dict[str, Any]:
    from forebay.cli.brokers import BrokerCalls
    from forebay.client.topics import topic_path
    from forebay.client.transport import HttpCall
    from forebay.wire.messages import PartitionList, ShardList

    with run.reading() as log:
        topic = log.topic(name)
        shards = [_asked_item(topic, partition) for partition in range(topic.partitions)]
    with BrokerCalls(url) as calls:
        path = topic_path(topic.spec.name)
        for one in calls.ask(HttpCall(method="GET", path=f"{path}/status"), PartitionList).partitions:
            shards[one.partition] |= _open_item(one)
        # Who has had the partitions is for administrators.
        with contextlib.suppress(Forbidden):
            for shard in calls.ask(HttpCall(method="GET", path=f"{path}/shards"), ShardList).shards:
                shards[shard.partition]["losses"] = losses_items(shard.losses)
    return {**spec_item(topic.spec), "url": url, "shards": shards}


def _asked_item(topic: TopicHandle, partition: int) -> dict[str, Any]:
    """A partition that the broker does not have open; asking for its offsets opens it if it has any."""
    item: dict[str, Any] = {"partition": partition, "epoch": 0, "phase": "new", "recovery": None, "failure": None}
    item["files"] = 0
    try:
        offsets = topic.offsets(partition)
    except ForebayError as error:
        return item | {"failure": str(error)}
    return item | {"offsets": offsets._asdict(), "last_committed": offsets.next - 1}


def _open_item(one: PartitionItem) -> dict[str, Any]:
    """A partition that the broker has open."""
    offsets = one.offsets.offsets()
    item: dict[str, Any] = {"epoch": one.epoch, "phase": "open", "recovery": one.recovery.summary}
    item |= {"failure": one.failure, "files": one.segments}
    if one.export is not None:
        behind = {
            "files": one.export.behind_files,
            "records": one.export.behind_records,
            "bytes": one.export.behind_bytes,
        }
        item |= {"exported": one.export.exported, "behind": behind}
    return item | {"offsets": offsets._asdict(), "last_committed": offsets.next - 1}


def spec_item(spec: TopicSpec) -> dict[str, Any]:
    """The definition of a topic as plain values."""
    from forebay.wire.messages import TopicItem

    found: dict[str, Any] = msgspec.to_builtins(TopicItem.of(spec))
    return found


def limits_line(item: dict[str, Any]) -> str:
    """How much of a topic is kept, for people."""
    kept = [
        f"{item['cap_records']} offsets" if item["cap_records"] is not None else "",
        readable_bytes(item["cap_bytes"]) if item["cap_bytes"] is not None else "",
        f"for {item['ttl_ms'] / 1000:g} s" if item["ttl_ms"] is not None else "",
    ]
    limits = ", ".join(text for text in kept if text) or "everything"
    compacted = f", compacted after {item['compact_lag_ms'] / 1000:g} s" if item["cleanup"] == "compact" else ""
    lossy = "; subscriptions deliver at most once" if item["dispatch"] == "non_reliable" else ""
    is_taken = item["on_owner_loss"] == "take_over" and item["engine"] != "memory"
    waits = "; taken over when its owner is gone" if is_taken else ""
    return f"keeps {limits} ({item['on_full']}){compacted}{lossy}{waits}"


def _spec(log: Storage, name: str) -> TopicSpec:
    from forebay.topics import TopicName

    parsed = TopicName.parse(name)
    return next(spec for spec in log.topics() if spec.name == parsed)


def _is_followable(log: Storage, name: str) -> bool:
    """Whether this process can open the topic: one in its owner's memory it cannot."""
    from forebay.topics import Engine, TopicName

    parsed = TopicName.parse(name)
    return all(spec.engine is Engine.SEGMENT for spec in log.topics() if spec.name == parsed)


def _store_failure(run: Invocation, found: Inspected) -> str | None:
    """Why the store of history does not answer now. How its owner's last export went, the owner alone knows."""
    from forebay.clock import SystemClock
    from forebay.places import Stores

    if not run.settings.is_shared:
        return None
    stores = Stores(found, run.settings, disk=run.disk, clock=SystemClock())
    with contextlib.closing(stores):
        try:
            stores.of(run.settings.store.name).stat("absent")
        except ForebayError as error:
            return str(error)
    return None


def _shard_item(run: Invocation, log: Storage, found: Inspected, place: ExpectedShard) -> dict[str, Any]:
    from forebay.inspection import outlook

    assert place.spec is not None
    item: dict[str, Any] = {"partition": place.partition, "directory": place.directory}
    ahead = outlook(found, place, run.settings.wal, run.disk)
    item |= _state_item(found.state(place.spec, place.partition))
    item["recovery"] = str(ahead.decision) if ahead.decision is not None else None
    item["failure"] = ahead.refusal
    item |= {"files": ahead.files, "bytes": ahead.bytes}
    exported = _exported_end(found, place.spec, place.partition)
    item |= {"exported": exported, "behind": _behind(run.disk, place.directory, exported)}
    if ahead.refusal is None:
        try:
            offsets = log.topic(str(place.spec.name)).offsets(place.partition)
            item |= {"offsets": offsets._asdict(), "last_committed": offsets.next - 1}
        except ForebayError as error:
            item["failure"] = str(error)
    return item


def _state_item(state: ShardState | None) -> dict[str, Any]:
    if state is None:
        return {"epoch": 0, "phase": "new", "holder": None, "target": None, "losses": []}
    item: dict[str, Any] = {"epoch": state.epoch, "phase": str(state.phase)}
    item |= {"holder": state.holder, "target": state.target}
    item["losses"] = losses_items(state.losses)
    if state.sealed_at is not None:
        item |= {"sealed_by": state.sealed_by, "sealed_at": state.sealed_at, "last_committed": state.next_offset - 1}
    return item


def _exported_end(found: Inspected, spec: TopicSpec, partition: int) -> int:
    """The end of a partition's catalogued history."""
    from forebay.format.metadata.descriptor import Cur
    from forebay.format.metadata.keys import cur_key
    from forebay.format.metadata.value import decode_value

    key = cur_key(spec.namespace, spec.topic, partition, prefix=found.prefix)
    stored = found.entry(key)
    return decode_value(stored.value, Cur)[0].next if stored is not None else 0


def _behind(disk: Disk, directory: str, exported: int) -> dict[str, int]:
    """What is sealed here and not history yet."""
    from forebay.format.files.segment import parse_segment_name
    from forebay.wal.recovery.survey import indexed_files

    files = records = size = 0
    # Beside an owner a file may go between the list and the look.
    with contextlib.suppress(FileNotFoundError):
        names = [name for name in disk.list_directory(directory) if parse_segment_name(name) is not None]
        for sealed in indexed_files(disk, directory, names).values():
            if sealed.end > exported:
                files, records = files + 1, records + sealed.end - max(sealed.start, exported)
                with contextlib.closing(disk.open(sealed.path)) as file:
                    size += file.size()
    return {"files": files, "records": records, "bytes": size}


def _say_topic(item: dict[str, Any]) -> None:
    say(f"{item['name']}")
    for field in ("partitions", "durability", "engine", "compression", "generation", "topic_id", "mode"):
        if field in item:
            say(f"  {field:12} {item[field]}")
    say(f"  {'limits':12} {limits_line(item)}")
    say(f"  {'created':12} {readable_time(item['created_at'])}")
    if "url" in item:
        say(f"  {'owner':12} the broker at {item['url']}")
    else:
        _say_directory(item)
    for shard in item["shards"]:
        _say_shard(shard, item.get("directory_id"))


def _say_directory(item: dict[str, Any]) -> None:
    say(f"  {'owner':12} {'another process has the directory open' if item['owned'] else 'none at present'}")
    if item["store_failure"] is not None:
        say(f"  {'store':12} {item['store_failure']}")
    if item["engine"] == "memory":
        say("  its records live in the memory of its owner: no other process can see them")


def _say_shard(shard: dict[str, Any], here: str | None) -> None:
    offsets = shard.get("offsets", {})
    say(f"partition {shard['partition']}")
    say("  offsets      " + (" ".join(f"{name} {value}" for name, value in offsets.items()) or "unknown"))
    say(f"  state        {shard['phase']}, epoch {shard['epoch']}")
    if shard.get("holder") is not None:
        say(f"  holder       {'this directory' if shard['holder'] == here else 'directory ' + shard['holder']}")
    if "sealed_at" in shard:
        sealed = f"by {shard['sealed_by']} at {readable_time(shard['sealed_at'])}"
        bound = f", for directory {shard['target']}" if shard["target"] is not None else ""
        say(f"  sealed       {sealed}, last committed {shard['last_committed']}{bound}")
    for loss in shard.get("losses", ()):
        say(f"  given up     {loss_line(loss)}")
    if "behind" in shard:
        behind = shard["behind"]
        waiting = f"{behind['files']} files with {behind['records']} records, {readable_bytes(behind['bytes'])}, behind"
        say(f"  history      up to {shard['exported']}, {waiting if behind['files'] else 'nothing sealed is behind'}")
    if shard["recovery"] is not None:
        say(f"  recovery     {shard['recovery']}")
    if shard["failure"] is not None:
        say(f"  failure      {shard['failure']}")
    place = f", {readable_bytes(shard['bytes'])} in {shard['directory']}" if "directory" in shard else ""
    say(f"  files        {shard['files']}{place}")
