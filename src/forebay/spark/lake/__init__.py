"""From a topic to a typed table: values decoded by a schema, Parquet files, and commits that name their offsets."""
