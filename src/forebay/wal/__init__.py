"""The write-ahead log of a shard: what was appended here, on this disk, and how it comes back after any stop.

Knows frames, files and the disk. Knows no topics beyond their durability class and no metadata: the
epoch and the reservation of offsets come in as arguments. Start reading at `log`, then `writer`.
"""
