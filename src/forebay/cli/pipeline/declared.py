"""What `forebay pipeline run` and `plan` share: a pipeline read from its file and checked, and Spark for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.failures import complain
from forebay.cli.invocation import Invocation
from forebay.cli.spark import location_options, parse_conf, spark_session
from forebay.cli.terminal import say, say_json
from forebay.errors import Invalid

if TYPE_CHECKING:
    from forebay.spark.pipelines.file.model import Pipeline
    from forebay.spark.pipelines.outline import Outline
    from forebay.spark.start.session import Session

FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="The pipeline, in YAML.")]


def pipeline_session(run: Invocation, pipeline: Pipeline, master: str) -> AbstractContextManager[Session]:
    """Spark with the settings that the pipeline states."""
    settings = [f"{name}={value}" for name, value in pipeline.spark.items()]
    return spark_session(f"forebay {pipeline.name}", master, settings, verbose=run.options.verbose)


def checked_pipeline(run: Invocation, file: str, conf: Sequence[str] | None) -> tuple[Pipeline, Outline]:
    """The pipeline of a file and what it would do, checked as far as that goes without Spark."""
    from forebay.spark.pipelines.file.parsing import load_pipeline
    from forebay.spark.pipelines.outline import outline

    with flaws_by_line():
        pipeline = load_pipeline(file).with_settings(parse_conf(conf), "--conf")
        given = run.options
        said = (
            given.directory is not None
            or given.broker_url is not None
            or given.settings_file is not None
            or given.assignments
            or not pipeline.location
        )
        return pipeline, outline(pipeline, location_options(run) if said else None)


@contextmanager
def flaws_by_line() -> Iterator[None]:
    """Shows what is wrong with a file on a line for each thing."""
    from forebay.spark.pipelines.file.document import Flawed

    try:
        yield
    except Flawed as error:
        for flaw in error.flaws[:-1]:
            complain(flaw)
        raise Invalid(error.flaws[-1]) from error


def say_outline(outlined: Outline, *, as_json: bool) -> None:
    """Write what a pipeline would do."""
    if as_json:
        say_json(outlined.plain())
        return
    for line in outlined.lines():
        say(line)
