"""`forebay topic delete`: a topic with all its records, for good."""

from __future__ import annotations

from contextlib import suppress

from forebay.cli.commands import command
from forebay.cli.invocation import Invocation
from forebay.cli.options import TopicArgument, YesOption
from forebay.cli.terminal import confirm, meter, say
from forebay.cli.topic import app
from forebay.errors import Corrupt, UnsupportedFormat
from forebay.topics import TopicName


@command(app, "delete", examples=["forebay topic delete shop/orders --yes"], by_url=True)
def delete(
    run: Invocation,
    *,
    name: TopicArgument,
    yes: YesOption = False,
) -> None:
    """Delete a topic with all its records. There is no way back."""
    topic = TopicName.parse(name)
    with run.writing() as log:
        # One that is not there is said before anything is asked; one that cannot be read can still be deleted.
        with suppress(Corrupt, UnsupportedFormat):
            log.topic(topic)
        confirm(f"{topic} with all its records", yes=yes)
        with meter(f"delete {topic}", in_bytes=False):
            log.delete_topic(topic)
    say(f"{topic} is deleted")
