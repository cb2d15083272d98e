"""`forebay shard list` and `forebay shard status`: who has each partition, and how far it and its history go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from forebay.cli.commands import command
from forebay.cli.invocation import AsJson, Invocation, TopicArgument
from forebay.cli.terminal import PagedTable, flush, readable_time, say, say_json
from forebay.errors import ForebayError, UnknownTopic

if TYPE_CHECKING:
    from forebay.cli.brokers import BrokerCalls
    from forebay.storage import Storage
    from forebay.surface.blocking import Log
    from forebay.topics import TopicSpec

PAGE_TOPICS = 1000
"""Topics that are read at once."""

Name = Annotated[str | None, typer.Argument(metavar="[TOPIC]", help="This topic alone.", show_default=False)]
PartitionOption = Annotated[int | None, typer.Option(help="This partition alone.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    examples = ["forebay shard list", "forebay shard list shop/orders --json"]
    command(app, "list", examples=examples, by_url=True)(list_shards)
    examples = ["forebay shard status shop/orders", "forebay shard status shop/orders --partition 0 --json"]
    command(app, "status", examples=examples, by_url=True)(status)


def list_shards(run: Invocation, *, name: Name = None, as_json: AsJson = False) -> None:
    """List the partitions of all topics, or of one: state, epoch, which directory has them, the end of history.

    Changes nothing and opens no partition, also while another process has the directory open.
    """
    table = PagedTable("topic", "partition", "state", "epoch", "holder", "exported")
    with _States(run) as states:
        for page in states.pages(name):
            items = [item for spec in page for item in states.of(spec)]
            if as_json:
                for item in items:
                    say_json(item)
            else:
                table.say([_cells(item) for item in items])
            flush()


def status(run: Invocation, *, name: TopicArgument, partition: PartitionOption = None, as_json: AsJson = False) -> None:
    """Show the partitions of a topic: who has each, its watermarks, and how far its history is behind.

    Beside another process what that process has published is shown. What cannot be read says why under failure.
    """
    from forebay.partitioning import check_partition
    from forebay.topics import TopicName

    with _States(run, name) as states:
        spec = next(iter(next(states.pages(str(TopicName.parse(name))))))
        if partition is not None:
            check_partition(partition, spec.partitions)
        for recorded in states.of(spec):
            if partition in (None, recorded["partition"]):
                item = recorded | states.offsets(spec, recorded["partition"])
                if as_json:
                    say_json(item)
                else:
                    _say_shard(item)


class _States:
    """The partitions of a data directory or of a broker. For one command."""

    def __init__(self, run: Invocation, name: str | None = None) -> None:
        """With `name`, that topic is read too."""
        self._held = ExitStack()
        self._log: Log = self._held.enter_context(run.reading(name))
        self._calls: BrokerCalls | None = None
        if run.url is not None:
            from forebay.cli.brokers import BrokerCalls

            self._calls = self._held.enter_context(BrokerCalls(run.url))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def pages(self, name: str | None) -> Iterator[list[TopicSpec]]:
        """The definitions of all topics, or of one, page by page."""
        from forebay.topics import TopicName

        if name is not None:
            wanted = TopicName.parse(name)
            found = [spec for spec in self._log.topics(str(wanted), limit=1) if spec.name == wanted]
            if not found:
                raise UnknownTopic(
                    f'there is no topic {wanted}: see "forebay topic list" for what there is', topic=wanted
                )
            yield found
            return
        page = self._log.topics(limit=PAGE_TOPICS)
        while page:
            yield page
            page = self._log.topics(after=page[-1].name, limit=PAGE_TOPICS)

    def of(self, spec: TopicSpec) -> list[dict[str, Any]]:
        """The partitions of a topic as they are recorded."""
        return _recorded(self._storage, spec) if self._calls is None else _asked(self._calls, spec)

    def offsets(self, spec: TopicSpec, partition: int) -> dict[str, Any]:
        """The watermarks of a partition, or why they are not known."""
        try:
            offsets = self._log.topic(spec.name).offsets(partition)
        except ForebayError as error:
            return {"offsets": None, "failure": str(error)}
        return {"offsets": offsets._asdict(), "failure": None}

    @property
    def _storage(self) -> Storage:
        from forebay.storage import Storage

        assert isinstance(self._log, Storage), "a directory is opened as one"
        return self._log


def _recorded(log: Storage, spec: TopicSpec) -> list[dict[str, Any]]:
    found = []
    for shard in log.recorded(spec.name):
        state = shard.state
        holder = None if state is None else state.holder
        item = _item(spec, shard.partition, shard.phase, 0 if state is None else state.epoch, holder, shard.exported)
        item["here"] = holder is not None and holder == log.directory_id
        if state is not None and shard.is_sealed:
            item |= {"next": state.next_offset, "sealed_by": state.sealed_by, "sealed_at": state.sealed_at}
            item["target"] = state.target
        found.append(item)
    return found


def _asked(calls: BrokerCalls, spec: TopicSpec) -> list[dict[str, Any]]:
    from forebay.client.topics import topic_path
    from forebay.client.transport import HttpCall
    from forebay.wire.messages import ShardList

    found = []
    call = HttpCall(method="GET", path=f"{topic_path(spec.name)}/shards")
    for shard in calls.ask(call, ShardList).shards:
        item = _item(spec, shard.partition, shard.phase, shard.epoch, shard.holder, shard.exported)
        item["here"] = shard.here
        if shard.next is not None:
            item |= {"next": shard.next, "sealed_by": shard.sealed_by, "sealed_at": shard.sealed_at}
            item["target"] = shard.target
        found.append(item)
    return found


def _item(spec: TopicSpec, partition: int, phase: str, epoch: int, holder: str | None, exported: int) -> dict[str, Any]:
    return {
        "topic": str(spec.name),
        "partition": partition,
        "engine": spec.engine.value,
        "durability": spec.durability.value,
        "phase": phase,
        "epoch": epoch,
        "holder": holder,
        "exported": exported,
    }


def _cells(item: dict[str, Any]) -> tuple[object, ...]:
    holder = "here" if item["here"] else item["holder"] or "-"
    return item["topic"], item["partition"], item["phase"], item["epoch"], holder, item["exported"]


def _say_shard(item: dict[str, Any]) -> None:
    held = "this directory has it" if item["here"] else f"directory {item['holder']} has it"
    say(f"{item['topic']}[{item['partition']}]")
    say(f"  state        {item['phase']}, epoch {item['epoch']}{'' if item['holder'] is None else ', ' + held}")
    if "sealed_at" in item:
        bound = "" if item["target"] is None else f", for directory {item['target']}"
        say(f"  sealed       by {item['sealed_by']} at {readable_time(item['sealed_at'])}, next {item['next']}{bound}")
    offsets = item["offsets"]
    if offsets is not None:
        say("  offsets      " + " ".join(f"{name} {value}" for name, value in offsets.items()))
    behind = "" if offsets is None else f", {max(0, offsets['next'] - item['exported'])} offsets behind"
    say(f"  history      up to {item['exported']}{behind}")
    if item["failure"] is not None:
        say(f"  failure      {item['failure']}")
