"""`forebay pipeline run` and `plan`: pipelines declared in a file."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.commands import command
from forebay.cli.failures import complain
from forebay.cli.invocation import AsJson, Invocation
from forebay.cli.spark_options import (
    MASTER_DEFAULT,
    ConfOption,
    DryRunOption,
    MasterOption,
    location_options,
    parse_conf,
    spark_session,
)
from forebay.cli.terminal import say, say_json
from forebay.errors import Invalid

if TYPE_CHECKING:
    from forebay.spark.pipelines.model import Pipeline
    from forebay.spark.pipelines.outline import Outline
    from forebay.spark.pipelines.progress import SinkProgress
    from forebay.spark.start.session import Session

File = Annotated[str, typer.Argument(metavar="FILE", help="The pipeline, in YAML.")]
CheckOption = Annotated[
    bool, typer.Option("--check", help="Start Spark as well, and check the SQL: columns, functions, types.")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(
        app,
        "run",
        examples=[
            "forebay pipeline run revenue.yml",
            "forebay pipeline run revenue.yml --data /var/lib/forebay --master spark://head:7077",
            "forebay pipeline run revenue.yml --dry-run --json",
            "forebay pipeline run revenue.yml --conf spark.sql.shuffle.partitions=8",
        ],
    )(run_pipeline)
    command(
        app,
        "plan",
        examples=["forebay pipeline plan revenue.yml", "forebay pipeline plan revenue.yml --check --json"],
    )(plan)


def run_pipeline(
    run: Invocation,
    *,
    file: File,
    dry_run: DryRunOption = False,
    as_json: AsJson = False,
    master: MasterOption = MASTER_DEFAULT,
    conf: ConfOption = None,
) -> None:
    """Run a pipeline that a file declares: topics and files in, SQL between, topics and tables out.

    Everything that can be checked is, before Spark starts, and the SQL before the first row is read. A batch writes
    each sink as a whole; a stream goes on where it stopped and writes every row exactly once. Ctrl-C stops it in
    order.
    """
    pipeline, outlined = _checked(run, file, conf)
    if dry_run:
        _say_outline(outlined, as_json=as_json)
        return
    with _session(run, pipeline, master) as spark:
        from forebay.spark.pipelines.running import Running

        # Spark has taken the signals over, to end jobs wherever they are: we end queries, in order.
        with run.interruptions.heeded(), live_line() as on_progress:
            running = Running(
                pipeline=pipeline,
                place=outlined.location,
                on_progress=on_progress,
                guard=run.interruptions.held,
            )
            try:
                with _flaws_by_line():
                    running.run(spark)
            finally:
                report = running.report
                if as_json:
                    say_json(report.plain())
                else:
                    for line in report.lines():
                        say(line)


def plan(
    run: Invocation,
    *,
    file: File,
    check: CheckOption = False,
    as_json: AsJson = False,
    master: MasterOption = MASTER_DEFAULT,
    conf: ConfOption = None,
) -> None:
    """Show what a pipeline would do if it ran now: offsets and bytes to read, steps, sinks, checkpoints.

    Without --check no Spark is started. Changes nothing.
    """
    pipeline, outlined = _checked(run, file, conf)
    if check:
        with _session(run, pipeline, master) as spark:
            from forebay.spark.pipelines.views import build, own_session

            with _flaws_by_line(), own_session(spark, pipeline.spark) as session:
                build(session, pipeline, outlined.location)
    _say_outline(outlined, as_json=as_json)


def _session(run: Invocation, pipeline: Pipeline, master: str) -> AbstractContextManager[Session]:
    settings = [f"{name}={value}" for name, value in pipeline.spark.items()]
    return spark_session(f"forebay {pipeline.name}", master, settings, verbose=run.options.verbose)


def _checked(run: Invocation, file: str, conf: Sequence[str] | None) -> tuple[Pipeline, Outline]:
    from forebay.spark.pipelines.outline import outline
    from forebay.spark.pipelines.parsing import load_pipeline

    with _flaws_by_line():
        pipeline = load_pipeline(file).with_settings(parse_conf(conf), "--conf")
        given = run.options
        said = (
            given.directory is not None or given.settings_file is not None or given.assignments or not pipeline.location
        )
        return pipeline, outline(pipeline, location_options(run) if said else None)


@contextmanager
def _flaws_by_line() -> Iterator[None]:
    """Shows what is wrong with a file on a line for each thing."""
    from forebay.spark.pipelines.document import Flawed

    try:
        yield
    except Flawed as error:
        for flaw in error.flaws[:-1]:
            complain(flaw)
        raise Invalid(error.flaws[-1]) from error


def _say_outline(outlined: Outline, *, as_json: bool) -> None:
    if as_json:
        say_json(outlined.plain())
        return
    for line in outlined.lines():
        say(line)


@contextmanager
def live_line() -> Iterator[_Live | None]:
    """A line on stderr that is written again and again, where a person is looking."""
    if not sys.stderr.isatty():
        yield None
        return
    line = _Live()
    try:
        yield line
    finally:
        line.clear()


class _Live:
    """Shows how far the sinks are."""

    def __call__(self, sinks: Sequence[SinkProgress]) -> None:
        width = shutil.get_terminal_size().columns
        shown = " | ".join(str(sink) for sink in sinks)
        self.clear(shown[: max(width - 1, 20)])

    def clear(self, text: str = "") -> None:
        """Begin the line again."""
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()
