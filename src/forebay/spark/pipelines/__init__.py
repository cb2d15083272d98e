"""Pipelines declared in YAML: topics and files in, SQL between, topics and tables out."""
