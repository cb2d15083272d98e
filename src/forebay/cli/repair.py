"""`forebay repair`: mend local files from the store, objects from local files, and what is derived."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from forebay.cli.commands import command, root
from forebay.cli.directory import known_topic
from forebay.cli.failures import DAMAGE
from forebay.cli.invocation import Invocation
from forebay.cli.options import AsJson, OneTopic
from forebay.cli.terminal import meter, say, say_json


@command(root, "repair", examples=["forebay repair", "forebay repair --apply"])
def repair(
    run: Invocation,
    *,
    name: OneTopic = None,
    apply: Annotated[bool, typer.Option("--apply", help="Do it. Else it is only said what would be done.")] = False,
    as_json: AsJson = False,
) -> int:
    """Mend local files from the store and objects from local files; rebuild indexes and checkpoints.

    Without --apply it is only said what would be done. Only bytes with the catalogued hash are copied, and what is
    replaced is kept in the shard's aside/. Needs the directory for itself, and for objects that no living process
    owns the shard elsewhere. Ends with code 6 if something is damaged that cannot be repaired.
    """
    from forebay.clock import SystemClock
    from forebay.inspection import CHANGES, Action
    from forebay.inspection import repair as repaired

    topic = known_topic(run, name)
    with meter("repair", in_bytes=True) as shown:
        steps = repaired(
            run.directory,
            run.settings,
            disk=run.disk,
            clock=SystemClock(),
            topic=topic,
            apply=apply,
            on_total=shown.total,
            on_bytes=shown.advance,
        )
    for step in steps:
        if as_json:
            say_json(msgspec.to_builtins(step))
        else:
            say(str(step))
    planned = [step for step in steps if step.action in CHANGES]
    if not as_json:
        if not planned:
            say("nothing to repair" if not steps else "nothing else to repair")
        elif not apply:
            say(f'{len(planned)} steps planned, nothing changed: run "forebay repair --apply" to do them')
        else:
            say(f'{len(planned)} steps done: run "forebay verify" to see that all is sound')
    return DAMAGE if any(step.action is Action.CANNOT for step in steps) else 0
