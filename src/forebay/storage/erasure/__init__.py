"""Erasing a key: its records are deleted, and every file and object that still holds their bytes is named or rewritten.

`search` finds out what a file holds, `segments` does so for all that one shard has, and rewrites it, `database` has
RocksDB do the same, and `topic` puts the answers for a topic together.
"""
