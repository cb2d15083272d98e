"""Parquet segments: the compacted form of history, as bytes and as row groups."""
