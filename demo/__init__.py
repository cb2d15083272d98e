"""Forebay's main job, end to end, on a laptop: produce, consume, crash, recover, read in Spark."""
