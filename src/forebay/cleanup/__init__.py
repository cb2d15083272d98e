"""Which stored objects and files may be removed, and their removal: after compactions, loads, moves and deletions.

Knows shards, their history and bulk loads; knows no engines.
"""
