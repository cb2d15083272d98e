"""`forebay topic export`: everything appended so far becomes history now."""

from __future__ import annotations

from functools import partial

from forebay.cli.commands import command
from forebay.cli.invocation import Invocation
from forebay.cli.options import AsJson, TopicArgument
from forebay.cli.terminal import say, say_json
from forebay.cli.topic import app
from forebay.cli.topic.progress import AcceptDamage, export_progress


@command(app, "export", examples=["forebay topic export shop/orders --settings shared.yaml"], by_url=True)
def export(
    run: Invocation, *, name: TopicArgument, accept_damage: AcceptDamage = False, as_json: AsJson = False
) -> None:
    """Make everything appended so far history now, rather than at the next interval; say how far it reaches."""
    from forebay.topics import TopicName

    export_there = partial(_exported_here, run) if run.url is None else partial(_exported_asked, run.url)
    for partition, exported in enumerate(export_there(name, accept_damage=accept_damage)):
        if as_json:
            say_json({"topic": str(TopicName.parse(name)), "partition": partition, "exported": exported})
        else:
            say(f"{TopicName.parse(name)}[{partition}]: history ends at offset {exported}")


def _exported_here(run: Invocation, name: str, *, accept_damage: bool) -> list[int]:
    with run.writer() as log:
        spec = log.topic(name).spec
        log.check_held_here(name)
        if not all(shard.is_sealed for shard in log.recorded(name)):
            with export_progress(f"export {spec.name}") as on_file:
                log.export_topic(name, on_file, accept_damage=accept_damage)
        return [shard.exported for shard in log.recorded(name)]


def _exported_asked(url: str, name: str, *, accept_damage: bool) -> list[int]:
    from forebay.cli.brokers import asked_to
    from forebay.wire.messages import Exporting, ShardList

    exported = asked_to(url, name, "export", Exporting(accept_damage=accept_damage), ShardList)
    return [shard.exported for shard in exported.shards]
