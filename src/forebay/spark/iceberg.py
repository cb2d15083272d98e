"""The path that `forebay.spark.open_catalog` had before: programs that import it from here go on."""

from forebay.spark.tables.catalog import open_catalog

__all__ = ["open_catalog"]
