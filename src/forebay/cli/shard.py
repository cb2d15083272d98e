"""`forebay shard`: who has each partition, how far it goes, taking one over, and records that were set aside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, Self

import msgspec
import typer

from forebay.cli.commands import command, group
from forebay.cli.invocation import Invocation
from forebay.cli.options import AsJson, DryRunOption, OneTopic, PartitionOption, TopicArgument
from forebay.cli.terminal import PagedTable, flush, meter, readable_time, say, say_json
from forebay.errors import ForebayError, Invalid, UnknownTopic

if TYPE_CHECKING:
    from forebay.cli.brokers import BrokerCalls
    from forebay.format.metadata.descriptor import AcceptedLoss
    from forebay.inspection.salvage import Listed, Salvage
    from forebay.storage import Storage, Topic
    from forebay.surface.blocking import Log
    from forebay.topics import TopicName, TopicSpec
    from forebay.wire.messages import LossItem

PAGE_TOPICS = 1000
"""Topics that are read at once."""

app = group("shard", help="List and look after single partitions.")

FromOption = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="DIR", help="The data directory with the files [default: --data].", show_default=False
    ),
]
IntoOption = Annotated[
    str | None,
    typer.Option(metavar="TOPIC", help="Copy the records into this topic; made if there is none.", show_default=False),
]
AppendOption = Annotated[bool, typer.Option("--append", help="Append the records to their own topic again.")]
ShardArgument = Annotated[
    str,
    typer.Argument(metavar="TOPIC[PARTITION]", help="As shop/orders[0]; a topic alone means all of its partitions."),
]
AcceptLossOption = Annotated[
    bool,
    typer.Option("--accept-loss", help="Give up records that the last holder has not exported. There is no way back."),
]
ListOption = Annotated[bool, typer.Option("--list", help="Only say what there is.")]


@command(app, "list", examples=["forebay shard list", "forebay shard list shop/orders --json"], by_url=True)
def list_shards(run: Invocation, *, name: OneTopic = None, as_json: AsJson = False) -> None:
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


@command(
    app,
    "status",
    examples=["forebay shard status shop/orders", "forebay shard status shop/orders --partition 0 --json"],
    by_url=True,
)
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


@command(
    app,
    "salvage",
    examples=[
        "forebay shard salvage shop/orders --list",
        "forebay shard salvage shop/orders --data b --from a --into shop/orders-rescued --dry-run",
        "forebay shard salvage shop/orders --data b --from a --append",
    ],
)
def salvage(
    run: Invocation,
    *,
    name: TopicArgument,
    partition: PartitionOption = None,
    source: FromOption = None,
    into: IntoOption = None,
    append: AppendOption = False,
    list_only: ListOption = False,
    dry_run: DryRunOption = False,
    as_json: AsJson = False,
) -> None:
    """Bring back records that were set aside: torn tails, and what another owner's take-over has left behind.

    --data names the directory that has the topic now, --from the one that has the files. Only records whose offsets
    the topic reports as lost are copied, each once, however often this is run, with headers that say where it comes
    from; what had been deleted before it was lost is not. Nothing is removed. Frames that are not whole are said and
    left out.
    """
    if (into is not None) + append + list_only != 1:
        raise Invalid("say what to do: --list, --append or --into TOPIC, one of them")
    if dry_run and list_only:
        raise Invalid("--list changes nothing: leave --dry-run out")
    from forebay.inspection.salvage import salvages, target_of

    looking = list_only or dry_run
    with (
        run.reader() if looking else run.writer() as log,
        salvages(log, name, partition=partition, source=source) as found,
    ):
        if list_only:
            _say_files(found, as_json=as_json)
            return
        target = target_of(log, found, into, create=not dry_run)
        for one in found:
            _copy(one, target, into, apply=not dry_run, as_json=as_json)


@command(
    app,
    "take-over",
    examples=[
        "forebay shard take-over 'shop/orders[0]' --accept-loss",
        "forebay shard take-over shop/orders --accept-loss --url http://broker:7654",
    ],
    by_url=True,
)
def take_over(
    run: Invocation, *, shard: ShardArgument, accept_loss: AcceptLossOption = False, as_json: AsJson = False
) -> None:
    """Go on here with a partition whose owner is gone for good, without what it had not exported.

    Try to start a process in its directory first: then nothing is lost. With --accept-loss these offsets become a gap
    for ever; who accepted it, when, and which offsets, is recorded and shown by "topic show". Refused while the owner
    lives. If its directory comes back, "shard salvage" appends what lies there again.
    """
    name, partition = _parse_shard(shard)
    if not accept_loss:
        raise Invalid(
            f"{shard}: what its last holder has not exported would be lost for good. Start a process in that directory "
            '("forebay topic show" names it); or, if it will not come back, add --accept-loss'
        )
    for item in _taken_over(run, name, partition):
        if as_json:
            say_json(item)
        else:
            _say_taken(item)


def _parse_shard(text: str) -> tuple[TopicName, int | None]:
    """The topic, and its partition if one is named."""
    from forebay.topics import TopicName

    name, bracket, number = text.partition("[")
    if not bracket:
        return TopicName.parse(name), None
    if not number.endswith("]") or not number[:-1].isdecimal():
        raise Invalid(f"{text!r:.80} names no partition: write it as shop/orders[0]")
    return TopicName.parse(name), int(number[:-1])


def _taken_over(run: Invocation, name: TopicName, partition: int | None) -> Iterator[dict[str, Any]]:
    """Take over one partition after the other; what is recorded of each then."""
    if run.url is not None:
        from forebay.cli.brokers import asked_to
        from forebay.wire.messages import ShardList, TakingOver

        with run.reading() as asked:
            count = asked.topic(name).partitions
        for number in range(count) if partition is None else (partition,):
            taking = TakingOver(partition=number, accept_loss=True)
            for found in asked_to(run.url, str(name), "take-over", taking, ShardList).shards:
                yield _taken_item(name, number, found.epoch, found.losses)
        return
    with run.writer() as log:
        count = log.topic(name).partitions
        for number in range(count) if partition is None else (partition,):
            state = log.take_over(name, number, accept_loss=True)
            yield _taken_item(name, number, state.epoch, state.losses)


def _taken_item(
    name: TopicName, partition: int, epoch: int, losses: Sequence[AcceptedLoss | LossItem]
) -> dict[str, Any]:
    return {"topic": str(name), "partition": partition, "epoch": epoch, "losses": losses_items(losses)}


def losses_items(losses: Sequence[AcceptedLoss | LossItem]) -> list[dict[str, Any]]:
    """What take-overs have given up, as plain values."""
    return [msgspec.to_builtins(loss) for loss in losses]


def loss_line(loss: dict[str, Any]) -> str:
    """What one take-over has given up, for people."""
    given_up = f"offsets [{loss['start']}, {loss['stop']}) of directory {loss['holder']}"
    return f"{given_up}, by {loss['by']} at {readable_time(loss['at'])}"


def _say_taken(item: dict[str, Any]) -> None:
    say(f"{item['topic']}[{item['partition']}]: goes on here in epoch {item['epoch']}")
    for loss in item["losses"]:
        say(f"  given up     {loss_line(loss)}")


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


def _say_files(found: list[Salvage], *, as_json: bool) -> None:
    for one in found:
        for item in one.listed:
            shard = {"topic": one.topic.name, "partition": one.partition}
            if as_json:
                say_json({**shard, **_listed_item(item)})
                continue
            say(f"{one.topic.name}[{one.partition}] {item.path}: {_listed_line(item)}")
            for byte, count in item.damaged:
                say(f"  {count} bytes at byte {byte} are no whole frame")


def _copy(one: Salvage, target: Topic | None, into: str | None, *, apply: bool, as_json: bool) -> None:
    with meter(f"salvage {one.topic.name}[{one.partition}]", in_bytes=False) as shown:
        shown.total(sum(item.records for item in one.listed))
        counted = one.copy_to(target, apply=apply, on_records=shown.advance)
    damaged = sum(len(item.damaged) for item in one.listed)
    unreadable = sum(not item.readable for item in one.listed)
    name = target.name if target is not None else into
    if as_json:
        item: dict[str, Any] = {"topic": one.topic.name, "partition": one.partition, "into": name}
        item |= {"files": len(one.files), "copied": counted.copied, "present": counted.present}
        say_json(item | {"damaged": damaged, "unreadable": unreadable, "dry_run": not apply})
        return
    done = "are copied" if apply else "would be copied"
    say(
        f"{one.topic.name}[{one.partition}]: {counted.copied} records of {len(one.files)} files {done} to {name}, "
        f"{counted.present} were there already"
    )
    if damaged or unreadable:
        say(f"  left out: {damaged} places without a whole frame, {unreadable} files whose header is gone; see --list")


def _listed_item(item: Listed) -> dict[str, Any]:
    return {
        "path": item.path,
        "kind": "tail" if item.is_tail else "file",
        "readable": item.readable,
        "start": item.start,
        "stop": item.stop,
        "records": item.records,
        "lost": item.lost,
        "epochs": item.epochs,
        "damaged": [place._asdict() for place in item.damaged],
    }


def _listed_line(item: Listed) -> str:
    kind = "torn tail" if item.is_tail else "file"
    if not item.readable:
        return f"{kind}, its segment's header is gone: nothing in it can be checked"
    if item.start is None:
        return f"{kind} without records"
    epochs = ", ".join(map(str, item.epochs))
    return f"{kind}, offsets [{item.start}, {item.stop}), {item.records} records of epoch {epochs}, {item.lost} lost"
