"""While a pipeline is analysed Spark does not log what it raises; afterwards it logs as before."""

from __future__ import annotations

import logging

import pytest
from pyspark.errors import AnalysisException
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from forebay.spark.pipelines import failures
from forebay.spark.pipelines.failures import quiet


def test_the_loggers_that_are_silenced_stay_those_of_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("forebay-test-never-made-before",)
    monkeypatch.setattr(failures, "SILENCED", names)

    with quiet():
        assert logging.getLogger(names[0]).disabled

    silenced = logging.getLogger(names[0])
    assert isinstance(silenced, PySparkLogger)
    assert not silenced.disabled


@pytest.mark.spark
def test_a_wrong_column_is_still_an_error_of_analysis_afterwards(spark: SparkSession) -> None:
    with quiet(), pytest.raises(AnalysisException):
        spark.range(1).selectExpr("nothing")

    with pytest.raises(AnalysisException, match="nothing"):
        spark.range(1).selectExpr("nothing")
