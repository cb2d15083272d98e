"""What every test shares: the ledger, how hard hypothesis tries, and one worker for all of Spark."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from forebay import locks
from tests.ledger import Budgets, Ledger, LedgerPlugin, enclose
from tests.shares import SharesScheduling, is_all_slow, longest_first
from tests.support import jvm
from tests.support.soak import SOAK

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

# No deadline: a shared machine is slow at moments, which says nothing about the code.
hypothesis.settings.register_profile("normal", deadline=None)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=20)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=5_000)
hypothesis.settings.load_profile("soak" if SOAK else "normal")

# Settings that another caller uses otherwise are not those of a test, which could write into a store of theirs.
for _name in [name for name in os.environ if name.startswith("FOREBAY_") and "__" in name]:
    del os.environ[_name]

os.environ |= jvm.ENVIRONMENT

locks.check_order(on=True)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in its background so, and Ctrl-C is what some tests are about.
    signal.signal(signal.SIGINT, signal.default_int_handler)

QUICK = "not slow and not spark"
"""What `make check` runs (tools/run_tests.sh)."""
SPARK_SECONDS = 900
SOAK_SECONDS = 7200


def pytest_configure(config: pytest.Config) -> None:
    # Only where all tests run, and not in the workers of xdist: a few tests by themselves have no budget.
    is_judged = os.environ.get("FOREBAY_BUDGETS") == "1" and not hasattr(config, "workerinput")
    config.pluginmanager.register(LedgerPlugin(Budgets.load() if is_judged else None), "forebay-ledger")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In a quick run, files that have no quick tests: importing them takes longer than some areas."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and config.option.markexpr == QUICK and is_all_slow(collection_path) else None


@pytest.hookimpl(tryfirst=True, optionalhook=True)  # before xdist's own choice; without xdist there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    if config.option.dist != "loadgroup":
        return None
    config.option.loadscopereorder = False  # the order is that of `longest_first`
    return SharesScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items[:] = longest_first(items)
    for item in items:
        if item.get_closest_marker("spark"):
            # A busy machine starts Spark in a minute.
            item.add_marker(pytest.mark.timeout(SPARK_SECONDS))
        if SOAK:
            # The sizes are other ones: the time that a test names is for those of every day.
            item.add_marker(pytest.mark.timeout(SOAK_SECONDS), append=False)


@pytest.fixture(autouse=True)
def locks_in_order(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every lock that a test makes checks its rank, also in threads that log what they meet and go on.

    Not where one thread plays several processes, or calls are counted: such a test has the mark `plain_locks`.
    """
    locks.check_order(on=request.node.get_closest_marker("plain_locks") is None)
    yield
    locks.check_order(on=True)
    assert locks.violations() == []


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The one Spark session of the run. Its working directory, where relative paths start, is an empty one."""
    from forebay.spark import session  # noqa: PLC0415
    from tests.spark.mixed import ENVIRONMENT  # noqa: PLC0415

    os.environ.update(ENVIRONMENT)  # before Spark starts: its workers know what was set by then
    # One JVM runs the queries of all tests, and Spark keeps the plans and tasks of the last 1,000 for its web page.
    # With 1 GB the JVM once ended at a row of 64 MB, late in a run.
    small = {
        "spark.driver.memory": "2g",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.retainedJobs": "20",
        "spark.ui.retainedStages": "20",
        "spark.ui.retainedTasks": "1000",
        "spark.sql.ui.retainedExecutions": "20",
        "spark.sql.streaming.ui.retainedQueries": "5",
    }
    with contextlib.chdir(tmp_path_factory.mktemp("spark")):
        started = session("forebay tests", master="local[2]", settings=small)
    yield started
    started.stop()


@pytest.fixture
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    """Where a test counts what it has shown: `ledger.count("kills")`."""
    ledger = Ledger()
    yield ledger
    enclose(ledger, request.node)
