"""Subscriptions: a name for the cursors of a topic, with delivery, acknowledgement and redelivery.

`window` is the pure state machine of one partition: which records are due, with whom, and what is done. `cursor` is
what is stored of it, `definitions` where subscriptions are defined, `dispatch` one subscription as a process serves
it: its consumers, and a window for each partition. Nothing here reads records, waits for them or has a thread:
`storage.subscriptions` and `aio.subscriptions` drive it.
"""
