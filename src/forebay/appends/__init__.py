"""What the appends of every engine share: a queue that assigns offsets, one writer for all that wait, callbacks.

Knows records, tickets and locks; knows nothing of files, databases or who owns a shard.
"""
