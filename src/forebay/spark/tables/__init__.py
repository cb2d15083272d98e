"""Open tables: their catalog, the files that tasks write, commits and upkeep; and a topic as one DataFrame."""
