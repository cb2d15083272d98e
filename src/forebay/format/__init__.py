"""The bytes of Forebay: frames, segment files, indexes, checkpoints and stored metadata values.

Pure functions from values to bytes and back. This room does no I/O, reads no clock, and knows
nothing of shards, the catalog or its callers. `checksum` serves all; the sub-packages import in one
direction: parquet, metadata, index, files and control, frame, columns.
"""
