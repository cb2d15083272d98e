"""`forebay topic unseal`: a sealed topic goes on in the directory it was sealed in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.cli.commands import command
from forebay.cli.invocation import Invocation
from forebay.cli.options import TopicArgument
from forebay.cli.terminal import say
from forebay.cli.topic import app

if TYPE_CHECKING:
    from forebay.surface.blocking import TopicHandle


@command(app, "unseal", examples=["forebay topic unseal shop/orders"], by_url=True)
def unseal(run: Invocation, *, name: TopicArgument) -> None:
    """Take a sealed topic back into this directory, unless another has opened it by now."""
    if run.url is not None:
        from forebay.cli.brokers import asked_to
        from forebay.wire.messages import ShardList

        asked_to(run.url, name, "unseal", None, ShardList)
        with run.reading() as log:
            _say_open(log.topic(name))
        return
    with run.writer() as log:
        log.check_not_arrived(name)
        log.unseal_topic(name)
        # Asking opens it, and that is what takes it back.
        _say_open(log.topic(name))


def _say_open(topic: TopicHandle) -> None:
    for partition in range(topic.partitions):
        say(f"{topic.name}[{partition}]: open here at offset {topic.offsets(partition).next}")
