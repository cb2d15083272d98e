"""Units of work spread over executors: each done once somewhere, its result brought back, its failure too.

Goes by DataFrames alone, so that it runs through Spark Connect as well. Units and results are plain values that
msgspec can write down: dataclasses, structs, tuples. Units are handed out in waves, two of which are under way at a
time: that is how a job knows how far it is, and how it can note what is done before all of it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

import msgspec
import pyarrow as pa

from forebay.decoders import unpacked
from forebay.spark.jobs.report import JobProgress, Unseen

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

U = TypeVar("U")
R = TypeVar("R")

WAVE_UNITS: Final = 64
TASKS_MAX: Final = 32
"""Of one wave: a task costs about 50 ms whatever it does."""
WAVES: Final = 2
ALONE_FAILURES: Final = 3
"""After so many units in a row that fail by themselves, the rest of a wave is not tried."""
ERROR_CHARACTERS: Final = 2000
_UNITS: Final = "number bigint, unit binary"
_RESULTS: Final = "number bigint, result binary, error string"
_RESULT_SCHEMA: Final = pa.schema([("number", pa.int64()), ("result", pa.binary()), ("error", pa.string())])


class UnitOutcome(NamedTuple, Generic[U, R]):
    """What became of one unit: a result, or the reason why there is none."""

    unit: U
    result: R | None
    error: str | None


def spread(
    spark: SparkSession,
    units: Sequence[U],
    work: Callable[[U], R],
    *,
    unit_type: type[U],
    result_type: type[R],
    progress: JobProgress | None = None,
    weight: Callable[[U], int] = lambda unit: 1,
    wave_units: int = WAVE_UNITS,
) -> Iterator[UnitOutcome[U, R]]:
    """Do `work` with every unit on the executors; the outcomes wave by wave, in the order of the units.

    A unit that fails has an error for an outcome; the others go on. `progress` counts in `weight`. `work` and what
    it knows are sent to the executors.
    """
    shown = progress or Unseen()
    shown.total(sum(map(weight, units)))
    waves = [units[first : first + wave_units] for first in range(0, len(units), wave_units)]
    # The driver's threads only wait: what they start runs side by side on the executors.
    with ThreadPoolExecutor(WAVES, "forebay-units") as threads:
        ahead = [threads.submit(_wave, spark, wave, work, unit_type, result_type) for wave in waves[:WAVES]]
        for number in range(len(waves)):
            outcomes = ahead.pop(0).result()
            if number + WAVES < len(waves):
                ahead.append(threads.submit(_wave, spark, waves[number + WAVES], work, unit_type, result_type))
            for outcome in outcomes:
                shown.advance(weight(outcome.unit))
                yield outcome


def _wave(
    spark: SparkSession, units: Sequence[U], work: Callable[[U], R], unit_type: type[U], result_type: type[R]
) -> list[UnitOutcome[U, R]]:
    """The outcomes of these units, done side by side; where a unit takes its task with it, each by itself."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        return run_together(spark, units, work, unit_type, result_type)
    except (PySparkException, Py4JError) as error:
        lost = f"the task ended before its result was known: {said(error)}"
        if len(units) == 1:
            return [UnitOutcome(units[0], None, lost)]
    outcomes: list[UnitOutcome[U, R]] = []
    for unit in units:
        if len(outcomes) >= ALONE_FAILURES and not any(one.error is None for one in outcomes[-ALONE_FAILURES:]):
            # It is not the units: nothing is gained by trying the others too.
            outcomes.append(UnitOutcome(unit, None, lost))
        else:
            outcomes += _wave(spark, [unit], work, unit_type, result_type)
    return outcomes


def run_together(
    spark: SparkSession, units: Sequence[U], work: Callable[[U], R], unit_type: type[U], result_type: type[R]
) -> list[UnitOutcome[U, R]]:
    rows = [(number, bytearray(msgspec.msgpack.encode(unit))) for number, unit in enumerate(units)]
    frame = spark.createDataFrame(rows, _UNITS).repartition(min(len(units), TASKS_MAX))
    found = frame.mapInArrow(_worker(work, unit_type), _RESULTS).collect()
    results: dict[int, tuple[bytes | None, str | None]] = {
        row["number"]: (row["result"], row["error"]) for row in found
    }
    return [_outcome(unit, *results[number], result_type) for number, unit in enumerate(units)]


def _outcome(unit: U, result: bytes | None, error: str | None, result_type: type[R]) -> UnitOutcome[U, R]:
    if result is None:
        return UnitOutcome(unit, None, error)
    return UnitOutcome(unit, unpacked(result, result_type), None)


def _worker(
    work: Callable[[U], R], unit_type: type[U]
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What a task does with its units."""

    def worked(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number, unit in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                result, error = None, None
                try:
                    result = msgspec.msgpack.encode(work(unpacked(unit, unit_type)))
                except Exception as failure:  # noqa: BLE001 - whatever it is, the other units go on
                    error = f"{type(failure).__name__}: {failure}"[:ERROR_CHARACTERS]
                yield pa.RecordBatch.from_pylist(
                    [{"number": number, "result": result, "error": error}], schema=_RESULT_SCHEMA
                )

    return worked


def said(error: Exception) -> str:
    """The last line of what Spark says before it lists where in Java it stood."""
    said = str(error).partition("\n\tat ")[0].strip()
    return said.rpartition("\n")[2].rpartition("Exception: ")[2][:ERROR_CHARACTERS]
