"""`forebay pipeline run`: run a pipeline that a file declares."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from forebay.cli.commands import command
from forebay.cli.invocation import Invocation
from forebay.cli.options import MASTER_DEFAULT, AsJson, ConfOption, DryRunOption, MasterOption
from forebay.cli.pipeline import app
from forebay.cli.pipeline.declared import FileArgument, checked_pipeline, flaws_by_line, pipeline_session, say_outline
from forebay.cli.terminal import say, say_json

if TYPE_CHECKING:
    from forebay.spark.pipelines.progress import SinkProgress


@command(
    app,
    "run",
    examples=[
        "forebay pipeline run revenue.yml",
        "forebay pipeline run revenue.yml --data /var/lib/forebay --master spark://head:7077",
        "forebay pipeline run revenue.yml --dry-run --json",
        "forebay pipeline run revenue.yml --conf spark.sql.shuffle.partitions=8",
    ],
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
        with run.interruptions.heeded(), live_line() as on_progress:
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
