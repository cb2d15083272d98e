"""Opens a log after any kind of stop, and repairs one that has failed while it is open.

`survey` states the facts of a shard's directory, `resume` acts on what was decided about them and gives a log that
takes appends, `heal` puts a fresh copy in the place of a file whose write or sync has failed.
"""
