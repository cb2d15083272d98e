"""What the jobs on Spark share: where the records are, how Spark is started, progress, the answer.

A job states its own options. Those that all jobs have are added to them, and come to it as a `Job`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli.commands import command
from forebay.cli.failures import DAMAGE, UNAVAILABLE
from forebay.cli.invocation import Invocation
from forebay.cli.options import MASTER_DEFAULT, AsJson, ConfOption, DryRunOption, MasterOption
from forebay.cli.spark import location_of, spark_session
from forebay.cli.terminal import Meter, meter, say

if TYPE_CHECKING:
    from forebay.spark.jobs.report import JobReport
    from forebay.spark.place.location import Location
    from forebay.spark.start.session import Session

TopicNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="TOPIC", help="These topics; else all that have history.", show_default=False),
]
WhereOption = Annotated[
    str | None,
    typer.Option(
        metavar="CONDITION",
        help="Only records that meet it: comparisons of offset, partition, timestamp, topic, key, tag, joined by AND.",
        show_default=False,
    ),
]
SHARED: dict[str, tuple[Any, Any]] = {
    "dry_run": (DryRunOption, False),
    "as_json": (AsJson, False),
    "master": (MasterOption, MASTER_DEFAULT),
    "conf": (ConfOption, None),
}
"""The options of every job, each with its default."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of a job, as it was asked for."""

    name: str
    location: Location
    dry_run: bool
    as_json: bool
    master: str
    conf: Sequence[str] | None

    @contextmanager
    def on_spark(self, *, in_bytes: bool = False) -> Iterator[tuple[Session, Meter]]:
        """Spark for the block, and what shows how far the job is. Import what needs Spark inside."""
        with (
            spark_session(f"forebay {self.name}", self.master, self.conf) as spark,
            meter(self.name, in_bytes=in_bytes) as shown,
        ):
            yield spark, shown

    def answer(self, report: JobReport) -> int:
        """Write the report; the exit code that it stands for."""
        return say_report(report, as_json=self.as_json)


def job_command(
    app: typer.Typer, name: str, *, examples: Sequence[str], formerly: typer.Typer, by_url: bool = False
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register a job: a function of the `Job` and of its own options, which returns an exit code.

    `formerly` is the group that it was in once. `by_url` says that the job can ask a broker.
    """

    def register(body: Callable[..., int]) -> Callable[..., int]:
        def run_job(run: Invocation, **given: Any) -> int:
            shared = {option: given.pop(option) for option in SHARED}
            return body(Job(name=name, location=location_of(run), **shared), **given)

        _, *own = inspect.signature(body, eval_str=True).parameters.values()
        shared = [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for option, (kind, default) in SHARED.items()
        ]
        run = inspect.Parameter("run", inspect.Parameter.POSITIONAL_ONLY, annotation=Invocation)
        run_job.__signature__ = inspect.Signature([run, *own, *shared])  # type: ignore[attr-defined]
        run_job.__doc__ = body.__doc__
        run_job.__wrapped__ = body  # type: ignore[attr-defined]
        command(app, name, examples=examples, by_url=by_url, formerly=formerly)(run_job)
        return body

    return register


def say_report(report: JobReport, *, as_json: bool) -> int:
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
