"""Units over executors: every one done, results in order, and a failure that costs its own unit alone."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

import msgspec
import pytest
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from forebay.errors import Corrupt
from forebay.inspection.findings import Finding, Severity
from forebay.spark.jobs import units as units_module
from forebay.spark.jobs.report import JobReport, Part, summed
from forebay.spark.jobs.units import UnitOutcome, spread

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]  # no tests there


class Unit(NamedTuple):
    """A number to square."""

    number: int
    name: str


class Seen:
    """Progress, noted."""

    def __init__(self) -> None:
        self.whole = 0
        self.done = 0

    def total(self, amount: int) -> None:
        self.whole = amount

    def advance(self, amount: int) -> None:
        self.done += amount


def square(unit: Unit) -> Part:
    if unit.name == "bad":
        raise Corrupt(f"unit {unit.number} is bad")
    return Part(topic=unit.name, figures={"square": unit.number**2, "pid": os.getpid()})


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_each_unit_is_done_elsewhere_and_a_failure_is_its_own(spark: SparkSession) -> None:
    units = [Unit(number, "bad" if number == 5 else "good") for number in range(10)]
    seen = Seen()

    outcomes = list(
        spread(
            spark,
            units,
            square,
            unit_type=Unit,
            result_type=Part,
            progress=seen,
            weight=lambda unit: unit.number,
            wave_units=4,
        )
    )

    assert [outcome.unit for outcome in outcomes] == units
    results = [outcome.result.figures["square"] if outcome.result else None for outcome in outcomes]
    assert results == [number**2 if number != 5 else None for number in range(10)]
    assert [outcome.error for outcome in outcomes if outcome.error] == ["Corrupt: unit 5 is bad"]
    assert all(outcome.result.figures["pid"] != os.getpid() for outcome in outcomes if outcome.result)
    assert seen.whole == seen.done == 45


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_a_unit_that_ends_its_task_is_reported_and_the_others_go_on(spark: SparkSession) -> None:
    units = [Unit(number, "") for number in range(4)]

    outcomes = list(
        spread(
            spark,
            units,
            lambda unit: os._exit(3) if unit.number == 1 else square(unit),
            unit_type=Unit,
            result_type=Part,
            wave_units=3,
        )
    )

    squares = [outcome.result.figures["square"] if outcome.result is not None else None for outcome in outcomes]
    assert squares == [0, None, 4, 9]
    assert "ended before its result was known: Python worker" in (outcomes[1].error or "")


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_where_nothing_works_not_every_unit_is_tried(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def refused(spark: object, units: list[Unit], *_: object) -> list[UnitOutcome[Unit, Part]]:
        tried.append(len(units))
        raise PySparkException("no executor is left")

    monkeypatch.setattr(units_module, "run_together", refused)
    units = [Unit(number, "") for number in range(10)]

    outcomes = list(spread(spark, units, square, unit_type=Unit, result_type=Part))

    assert [outcome.unit for outcome in outcomes] == units and tried == [10, 1, 1, 1]
    assert all("no executor is left" in (outcome.error or "") for outcome in outcomes)


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_no_units_are_no_work(spark: SparkSession) -> None:
    assert list(spread(spark, [], square, unit_type=Unit, result_type=Part)) == []


def test_a_report_reads_as_lines_and_as_json() -> None:
    parts = (
        Part(topic="shop/orders", partition=0, figures={"records": 1200, "bytes": 10, "format": "frames"}),
        Part(topic="shop/orders", partition=1, figures={"records": 30, "ratio": 0.5, "sound": True}),
    )
    finding = Finding(severity=Severity.ERROR, what="the object is missing", next_step="restore it", shard="a/b[0]")
    report = JobReport(
        job="scrub", summary="1 damaged", dry_run=True, figures=summed(parts), parts=parts, findings=(finding,)
    )

    assert report.lines() == [
        "error: a/b[0]: the object is missing; restore it",
        "shop/orders[0]: records 1,200, bytes 10, format frames",
        "shop/orders[1]: records 30, ratio 0.5, sound yes",
        "records 1,230, bytes 10, ratio 0.5",
        "scrub: 1 damaged (dry run: nothing was changed), 0.0 s",
    ]
    assert msgspec.json.decode(report.json(), type=JobReport) == report
    assert not report.is_clean
    assert JobReport(job="scrub", summary="sound").is_clean
