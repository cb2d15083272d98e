"""Makes `spark.read.format("forebay")` work without registering: Spark looks for modules named like this one."""

from forebay.spark.source import ForebayDataSource as DefaultSource

__all__ = ["DefaultSource"]
