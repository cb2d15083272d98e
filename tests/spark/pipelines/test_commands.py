"""`forebay pipeline plan` and `run` as commands: what they say, how they end, and what signals do to them."""

from __future__ import annotations

import importlib
import io
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from forebay.cli.pipeline.run import live_sinks
from forebay.errors import Unavailable
from forebay.spark import pipelines
from forebay.spark.pipelines.file.parsing import load_pipeline
from forebay.spark.pipelines.progress import SinkProgress
from tests.cli.rig import COMMAND, Outcome, Shell
from tests.ledger import Ledger
from tests.spark.pipelines import revenue
from tests.support.soak import SOAK
from tests.support.waiting import until

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SESSIONS: Final = importlib.import_module("forebay.spark.start.session")
"""The module: its name is also that of a function."""
_DEADLINE_SECONDS: Final = 300
_STARTS_MAX: Final = 3
_SIGNALS: Final = (signal.SIGINT, signal.SIGKILL) if SOAK else (signal.SIGINT,)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return revenue.shipped(tmp_path)


def _pipeline(home: Path, *words: str) -> Outcome:
    return Shell(home / "data").run("pipeline", *words)


def test_plan_and_dry_run_say_what_would_be_done_and_start_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_SESSIONS, "running", None)  # whichever caller would start Spark fails

    shown = _pipeline(home, "plan", f"{home}/revenue.yml")
    plain = _pipeline(home, "plan", f"{home}/revenue.yml", "--json")
    dry = _pipeline(home, "run", f"{home}/revenue.yml", "--dry-run")

    assert shown.code == 0 and shown.out == dry.out
    assert "shop/orders as json, watermark at delayed by 10 minutes: 600 offsets" in shown.out
    (item,) = plain.items
    assert item["trigger"] == "availableNow" and [sink["name"] for sink in item["sinks"]] == [
        *("revenue_topic", "revenue_table")
    ]
    assert not (home / "state").exists() and not (home / "tables").exists()


def test_every_flaw_has_a_line_of_its_own(home: Path) -> None:
    text = (home / "revenue.yml").read_text()
    (home / "bad.yml").write_text(text.replace("FROM paid", "FROM payd").replace("column: at", "column: att"))

    outcome = _pipeline(home, "plan", f"{home}/bad.yml")

    lines = outcome.err.splitlines()
    assert outcome.code == 2 and outcome.out == "" and len(lines) == 2
    assert lines[0].startswith(f"forebay: {home}/bad.yml:19:25: ") and "did you mean at?" in lines[0]
    assert lines[1].startswith(f"forebay: {home}/bad.yml:31:12: ") and "did you mean paid?" in lines[1]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("run", "gone.yml"), "cannot read gone.yml: No such file"),
        (("run", "revenue.yml", "--conf", "cores"), "--conf 'cores' is not NAME=VALUE"),
        (("run", "revenue.yml", "--dry-run", "--conf", "cores=2"), "--conf:1:1: cores is not a setting of Spark"),
        (("plan", "revenue.yml", "--set", "cores"), "--set 'cores' is not NAME=VALUE"),
    ],
)
def test_a_wrong_call_is_reported(
    words: tuple[str, ...], text: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)

    outcome = _pipeline(home, *words)

    assert outcome.code == 2 and text in outcome.err and outcome.err.count("\n") == 1


def test_without_java_nothing_starts_and_the_error_says_what_to_install(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_java(environment: object) -> Path:
        raise Unavailable("Spark needs Java 17 or newer, and none was found: install one and set JAVA_HOME")

    monkeypatch.setattr(_SESSIONS, "running", lambda: None)
    monkeypatch.setattr(_SESSIONS, "find_java", no_java)

    outcome = _pipeline(home, "run", f"{home}/revenue.yml")

    assert outcome.code == 4 and "Spark needs Java 17" in outcome.err and outcome.err.count("\n") == 1
    assert not (home / "state").exists()


def test_what_is_given_on_the_command_line_goes_before_the_file(home: Path) -> None:
    text = (home / "revenue.yml").read_text()
    (home / "set.yml").write_text(text + "spark: {spark.sql.shuffle.partitions: 8, spark.ui.enabled: false}\n")

    pipeline = load_pipeline(f"{home}/set.yml").with_settings({"spark.sql.shuffle.partitions": "3"}, "--conf")

    assert pipeline.spark == {"spark.sql.shuffle.partitions": "3", "spark.ui.enabled": "false"}


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_shows_how_far_the_sinks_are_where_a_person_is_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    sinks = [
        SinkProgress(name="out", writes="shop/out", batch=3, read=1200, rows=90, rows_per_second=400, lag=17),
        SinkProgress(name="files", writes="out", rows=5, tasks=(2, 8)),
    ]
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with live_sinks() as no_one:
        assert no_one is None

    monkeypatch.setattr("sys.stderr", terminal := _Terminal())
    with live_sinks() as show:
        assert show is not None
        show(sinks)
        lines = [line.split() for line in terminal.getvalue().splitlines()]
        shown = len(terminal.getvalue())

    assert ["out", "3", "1,200", "90", "400", "17"] in lines
    assert ["files", "2", "of", "8", "tasks", "0", "5", "0", "-"] in lines
    assert "\x1b[2K" in terminal.getvalue()[shown:], "the table is gone in the end"


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", _SIGNALS)
def test_a_stream_that_a_signal_ends_goes_on_exactly(
    spark: SparkSession, home: Path, number: signal.Signals, ledger: Ledger
) -> None:
    """As Ctrl-C on a terminal does it: the signal goes to all processes of the group."""
    child = _stream_until_revenue(home)
    try:
        os.killpg(child.pid, number)
        code = child.wait(_DEADLINE_SECONDS)
    finally:
        _kill(child)
    ledger.count("kills", of=f"pipeline by {number.name}")
    said = (home / "log").read_text()

    if number is signal.SIGINT:
        assert code == 130 and "pipeline revenue: stopped after" in said, said
        assert "/src/forebay/" not in said, "no traceback of ours; Spark's workers may write theirs as they go"
    revenue.add_orders(home, 600, 298)
    pipelines.run(spark, f"{home}/revenue.yml", {"path": f"{home}/data"})
    assert revenue.in_topic(home) == revenue.in_table(spark, home) == revenue.expected(898)


def _stream_until_revenue(home: Path) -> subprocess.Popen[bytes]:
    """Run the endless pipeline until it has written revenue.

    Spark gives a Python worker ten seconds to start. Where a busy machine takes longer, the command ends with Spark's
    message, and is started again, as a supervisor would do it.
    """
    arguments = [*COMMAND, "pipeline", "run", str(revenue.endless(home)), "--master", "local[2]"]
    arguments += ["--set", "wal.free_bytes_min=0"]
    for _ in range(_STARTS_MAX):
        with open(home / "log", "wb") as log:
            child = subprocess.Popen(arguments, stdout=log, stderr=log, start_new_session=True, cwd=home)
        try:
            if _has_revenue(home, child):
                return child
        except BaseException as error:
            error.add_note((home / "log").read_text())
            _kill(child)
            raise
        assert "Python worker failed to connect back" in (home / "log").read_text(), (home / "log").read_text()
    raise AssertionError((home / "log").read_text())


def _has_revenue(home: Path, child: subprocess.Popen[bytes]) -> bool:
    """Wait until the pipeline has written revenue; False if it ended before."""
    found = False

    def is_over() -> bool:
        nonlocal found
        found = bool(revenue.in_topic(home))
        return found or child.poll() is not None

    until(is_over, _DEADLINE_SECONDS)
    return found


def _kill(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
