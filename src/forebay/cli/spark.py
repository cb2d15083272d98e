"""What the commands on Spark share: how Spark is started, and where the records are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from forebay.cli.invocation import Invocation
from forebay.cli.options import DIRECTORY_VARIABLE, assigned
from forebay.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.spark.place.location import Location
    from forebay.spark.start.session import Session


def parse_conf(given: Sequence[str] | None) -> dict[str, str]:
    """`--conf spark.executor.memory=4g` as a mapping; later ones win."""
    return assigned("--conf", given, example="spark.executor.memory=4g")


@contextmanager
def spark_session(
    app_name: str, master: str, conf: Sequence[str] | None, *, verbose: bool | None = False
) -> Iterator[Session]:
    """A Spark session for the block, stopped behind it unless it was there before.

    Where Spark or Java is missing the block is not entered, and the error says what to install. What goes wrong is
    raised here: unless `verbose`, Spark does not log it as well, with its stacks. A Spark Connect server logs on its
    own side, as its operator chose.
    """
    settings = parse_conf(conf)
    from forebay.spark import session
    from forebay.spark.start.session import context_of, running

    before = running()
    spark = session(app_name, master=master, settings=settings)
    context = context_of(spark)
    if before is None and context is not None and not verbose:
        context.setLogLevel("FATAL")
    try:
        yield spark
    finally:
        if before is None:
            spark.stop()


def location_of(run: Invocation) -> Location:
    """Where the records are: a broker; or the data directory, unless a settings file alone leads to topics."""
    from forebay.spark.place.location import Location

    return Location.parse(location_options(run))


def location_options(run: Invocation) -> dict[str, str]:
    """The same, as options of a read or a write."""
    if run.url is not None:
        return _broker_options(run, run.url)
    options: dict[str, str] = {}
    given = run.options
    named = given.directory if given.directory is not None else os.environ.get(DIRECTORY_VARIABLE)
    if named or not _is_enough(run):
        options["path"] = run.directory
    if given.settings_file is not None:
        options["settings"] = given.settings_file
    return options | given.assigned


def _broker_options(run: Invocation, url: str) -> dict[str, str]:
    """The broker, which has answered, and the names of where its token and its authority are found."""
    from forebay.cli.brokers import AUTHORITY_VARIABLE, TOKEN_VARIABLE, check_reached

    if run.options.settings_file is not None:
        raise Invalid(
            f"--settings is of a data directory, and the broker at {url} has its own: leave it out, and give "
            "those of tables one by one, as --set table.warehouse=lake"
        )
    check_reached(url)
    options = {"broker": url}
    if os.environ.get(TOKEN_VARIABLE):
        options["tokenEnv"] = TOKEN_VARIABLE
    authority = os.environ.get(AUTHORITY_VARIABLE)
    if authority:
        options["verify"] = authority
    return options | run.options.assigned


def _is_enough(run: Invocation) -> bool:
    """Whether there is a settings file, and it names both a store and metadata outside of any data directory."""
    if run.options.settings_file is None or not run.settings.is_shared:
        return False
    return not run.settings.metadata.is_file or run.settings.metadata.path is not None
