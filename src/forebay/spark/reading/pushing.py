"""Whether Spark may hand a query's filters to the source: only where it keeps the plans of its scans apart.

Spark 4.3 and older keep what a push-down planned on an object that all scans of one `load()` share: the next use of
the same DataFrame, or another branch of the same query, reads the filtered rows as if they were all. So the source
takes no filters from such a Spark. A newer one is asked: a source of two rows is used several times, and its answers
say whether plans are kept apart. A reader runs in a process without a session and cannot ask; `forebay.spark.read` and
`forebay.spark.table` ask, and pass the answer on in the option `pushFilters`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from pyspark.errors import PySparkException
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType


logger = logging.getLogger(__name__)

SETTING: Final = "spark.sql.python.filterPushdown.enabled"
SHARED_BELOW: Final = (4, 4)
"""Every Spark below this version is known to share the plan of a push-down between scans."""


def is_old(version: str) -> bool:
    """Whether this version of Spark is known to share plans, or is not known."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is None or (int(numbers[1]), int(numbers[2])) < SHARED_BELOW


def may_push(spark: SparkSession) -> bool:
    """Whether filters may be pushed in this session. Asks Spark once for each session that is new enough."""
    return not is_old(spark.version) and spark.conf.get(SETTING, "false") == "true" and keeps_plans_apart(spark)


def push_options(spark: SparkSession) -> dict[str, str]:
    """What a read passes on to its reader, which has no session to ask."""
    return {"pushFilters": "true"} if may_push(spark) else {}


@lru_cache(maxsize=4)
def keeps_plans_apart(spark: SparkSession) -> bool:
    """Use one DataFrame with two filters and without any, beside each other and afterwards, and compare the answers.

    Needs the setting for push-down to be on. A Spark that cannot answer counts as one that shares plans.
    """
    try:
        spark.dataSource.register(TwoRows)
        rows = spark.read.format(TwoRows.name()).load()
        beside = rows.where("n < 1").union(rows.where("n < 2")).union(rows)
        found = [beside.count(), rows.count()]
    except PySparkException as error:
        logger.warning("filters are not pushed: Spark could not be asked whether it keeps plans apart: %s", error)
        return False
    return found == [1 + 2 + 2, 2]


class TwoRows(DataSource):
    """The numbers 0 and 1, with filters applied where they are planned, as the source `forebay` would."""

    @classmethod
    def name(cls) -> str:
        """The word for `format(…)`."""
        return "forebay_two_rows"

    def schema(self) -> str:
        """One number."""
        return "n INT"

    def reader(self, schema: StructType) -> DataSourceReader:
        """A read of both rows, or of those below a bound."""
        return _TwoRowsReader()


class _TwoRowsReader(DataSourceReader):
    def __init__(self) -> None:
        self._below = 2

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802 - Spark's name
        from pyspark.sql.datasource import LessThan  # Spark before 4.1 has none, and is not asked

        for each in filters:
            if isinstance(each, LessThan):
                self._below = min(self._below, each.value)
            else:
                yield each

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(self._below)]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        return iter([(number,) for number in range(partition.value)])
