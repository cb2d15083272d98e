"""The path that `forebay.spark.register` had before, as `run`: programs that import it from here go on."""

from forebay.spark.jobs.register import run

__all__ = ["run"]
