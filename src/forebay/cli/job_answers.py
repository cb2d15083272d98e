"""What the jobs below `forebay pipeline` share: options, progress, and how a report is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.failures import DAMAGE, UNAVAILABLE
from forebay.cli.terminal import say

if TYPE_CHECKING:
    from forebay.spark.jobs.reports import Report

TopicNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="TOPIC", help="These topics; else all that have history.", show_default=False),
]
OneTopic = Annotated[str, typer.Argument(metavar="TOPIC", help="namespace/topic, or topic for default/topic.")]


def say_report(report: Report, *, as_json: bool) -> int:
    """Write the report; the exit code that it stands for."""
    from forebay.inspection.findings import REACH, Severity

    if as_json:
        say(report.json())
    else:
        for line in report.lines():
            say(line)
    errors = [finding for finding in report.findings if finding.severity is Severity.ERROR]
    if not errors:
        return 0
    return UNAVAILABLE if all(finding.next_step == REACH for finding in errors) else DAMAGE
