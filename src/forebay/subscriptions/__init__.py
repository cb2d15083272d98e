"""Subscriptions: a name for the cursors of a topic, with delivery, acknowledgement and redelivery.

`window` is the state machine of one partition: which records are due, with whom, and what is done. Pure: it reads no
records, knows no clock and has no thread.
"""
