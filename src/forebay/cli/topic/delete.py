"""`forebay topic delete`: a topic with all its records, for good."""

from __future__ import annotations

from forebay.cli.commands import command
from forebay.cli.invocation import Invocation
from forebay.cli.options import TopicArgument, YesOption
from forebay.cli.terminal import confirm, meter, say
from forebay.cli.topic import app


@command(app, "delete", examples=["forebay topic delete shop/orders --yes"], by_url=True)
def delete(
    run: Invocation,
    *,
    name: TopicArgument,
    yes: YesOption = False,
) -> None:
    """Delete a topic with all its records. There is no way back."""
    with run.writing() as log:
        spec = log.topic(name).spec
        confirm(f"{spec.name} with all its records", yes=yes)
        with meter(f"delete {spec.name}", in_bytes=False):
            log.delete_topic(name)
    say(f"{spec.name} is deleted")
