"""The path that `forebay.spark.Location` had before: programs that import it from here go on."""

from forebay.spark.place.location import Location

__all__ = ["Location"]
