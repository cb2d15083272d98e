"""Compaction: many segments of a shard's history become few, in Parquet, without what ended; offsets stay.

Planned (`planning`, pure), written under names of their own (`merging`), then put in the place of what they were made
from, each by one transaction (`swapping`). Whatever is cut short leaves objects without descriptor, and is done again.
"""
