"""The history of a shard under examination: what the catalog says of it, and every copy that the catalog names.

Reads only. `verify` reports what is found here, `repair` mends it.
"""
