"""`forebay verify`: check everything in a data directory and its history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from forebay.cli.commands import command, root
from forebay.cli.directory import known_topic
from forebay.cli.failures import DAMAGE, UNAVAILABLE
from forebay.cli.invocation import Invocation
from forebay.cli.options import AsJson, OneTopic
from forebay.cli.terminal import meter, readable_bytes, say, say_json

if TYPE_CHECKING:
    from forebay.inspection import Report


@command(
    root,
    "verify",
    examples=["forebay verify", "forebay verify shop/orders --json", "forebay verify --data /var/lib/forebay"],
)
def verify(
    run: Invocation,
    *,
    name: OneTopic = None,
    quick: Annotated[bool, typer.Option("--quick", help="Do not read the objects of the history.")] = False,
    as_json: AsJson = False,
) -> int:
    """Check everything: every checksum and frame, indexes, checkpoints, sequence, metadata, history, database.

    Changes nothing and may run while another process has the directory open. Ends with code 0 if all is sound
    (notes and warnings do not count), with 6 if anything is damaged and with 4 if only a store cannot be reached.
    Each finding says what to do next.
    """
    from forebay.clock import SystemClock
    from forebay.inspection import verify as verified

    topic = known_topic(run, name)
    with meter("verify", in_bytes=True) as shown:
        report = verified(
            run.directory,
            run.settings,
            disk=run.disk,
            clock=SystemClock(),
            topic=topic,
            quick=quick,
            on_total=shown.total,
            on_bytes=shown.advance,
        )
    for item in (*report.findings, *report.histories):
        if as_json:
            say_json(msgspec.to_builtins(item))
        else:
            say(str(item))
    _say_summary(report, as_json=as_json)
    if report.is_open:
        return UNAVAILABLE
    return 0 if report.is_clean else DAMAGE


def _say_summary(report: Report, *, as_json: bool) -> None:
    counts = {
        "shards": report.shards,
        "files": report.files,
        "bytes": report.bytes,
        "frames": report.frames,
        "records": report.records,
        "objects": report.objects,
        "object_bytes": report.object_bytes,
    }
    if as_json:
        say_json({"clean": report.is_clean, "findings": len(report.findings), **counts})
        return
    size = readable_bytes(report.bytes)
    verdict = "all sound" if report.is_clean else "NOT ALL CHECKED" if report.is_open else "DAMAGED"
    objects = f"; {report.objects} objects, {readable_bytes(report.object_bytes)}" if report.objects else ""
    say(
        f"{verdict}: {report.shards} shards, {report.files} segment files, {size}, "
        f"{report.frames} frames, {report.records} records{objects}"
    )
