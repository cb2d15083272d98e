"""`forebay pipeline run`: run a pipeline that a file declares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from forebay.cli.commands import command
from forebay.cli.invocation import Invocation
from forebay.cli.options import MASTER_DEFAULT, AsJson, ConfOption, DryRunOption, MasterOption
from forebay.cli.pipeline import app
from forebay.cli.pipeline.declared import FileArgument, checked_pipeline, flaws_by_line, pipeline_session, say_outline
from forebay.cli.terminal import say, say_json, table_of

if TYPE_CHECKING:
    from forebay.spark.pipelines.progress import OnProgress, SinkProgress

SINK_HEADS = ("sink", "batch", "rows read", "written", "rows/s", "lag")


@command(
    app,
    "run",
    examples=[
        "forebay pipeline run revenue.yml",
        "forebay pipeline run revenue.yml --data /var/lib/forebay --master spark://head:7077",
        "forebay pipeline run revenue.yml --dry-run --json",
        "forebay pipeline run revenue.yml --conf spark.sql.shuffle.partitions=8",
        "forebay pipeline run revenue.yml --url http://127.0.0.1:7878",
    ],
    by_url=True,
)
def run_pipeline(
    run: Invocation,
    *,
    file: FileArgument,
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
    pipeline, outlined = checked_pipeline(run, file, conf)
    if dry_run:
        say_outline(outlined, as_json=as_json)
        return
    with pipeline_session(run, pipeline, master) as spark:
        from forebay.spark.pipelines.running import Running

        # Spark has taken the signals over, to end jobs wherever they are: we end queries, in order.
        with run.interruptions.heeded(), live_sinks() as on_progress:
            running = Running(
                pipeline=pipeline,
                place=outlined.location,
                on_progress=on_progress,
                guard=run.interruptions.held,
            )
            try:
                with flaws_by_line():
                    running.run(spark)
            finally:
                report = running.report
                if as_json:
                    say_json(report.plain())
                else:
                    for line in report.lines():
                        say(line)


@contextmanager
def live_sinks() -> Iterator[OnProgress | None]:
    """A table of the sinks on stderr that is drawn again and again, where a person is looking; gone in the end."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), transient=True, auto_refresh=False, redirect_stdout=False) as live:
        yield lambda sinks: live.update(table_of(SINK_HEADS, [_cells(sink) for sink in sinks]), refresh=True)


def _cells(sink: SinkProgress) -> tuple[str, ...]:
    """How far a sink is. Of one batch over everything there is no lag, and tasks are counted in place of batches."""
    tasks = None if sink.tasks is None else f"{sink.tasks[0]:,} of {sink.tasks[1]:,} tasks"
    batch = "-" if sink.batch is None else str(sink.batch)
    lag = "-" if sink.lag is None else f"{sink.lag:,}"
    return sink.name, tasks or batch, f"{sink.read:,}", f"{sink.rows:,}", f"{sink.rows_per_second:,.0f}", lag
