"""Bulk loads: segments prepared beside a log become part of a topic's history, in all its partitions or in none.

`prepare` writes the segments and lists them, `book` records how far a load is, `attach` puts it behind the log of one
shard, `forget` removes what is recorded of a load that is over, and `service` does all that for one data directory;
`topic` is what callers use.
Knows single shards; knows no engines.
"""
