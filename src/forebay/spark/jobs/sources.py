"""The path that `forebay.spark.Files`, `Frame` and `Table` had before: programs that import them from here go on."""

from forebay.spark.jobs.backfill import Files, Frame, Table

__all__ = ["Files", "Frame", "Table"]
