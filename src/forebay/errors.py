"""Every error Forebay raises on purpose, few and sorted by what the caller should do.

    ForebayError
    ├── Invalid               the call is wrong: change it; nothing was done
    │   ├── UnknownTopic      no such topic (a successful look-up said so)
    │   └── Unsupported       right in form, not offered here; the message names the way out
    │       └── UnsupportedFormat   bytes of a newer version: upgrade, nothing is corrupt
    ├── Conflict              it clashes with what is there (exists already, sequence out of step)
    ├── Unavailable           not now: try again; nothing was done, no offset was used
    │   ├── Full              a cap of the topic leaves no room, and it refuses new records
    │   └── Moved             another owner has the shard; the message says who
    ├── Indeterminate         it may or may not have happened, at most once: read to find out
    ├── Closed                this handle has ended (closed, forked, interpreter exit)
    │   └── Fenced            a newer owner took the shard over; this one must stop
    └── Corrupt               bytes are not what was written: run "forebay verify"
        └── DataLoss          a stream met a lost or damaged range and has no `on_gap`

The message is for people and says the next step. The values in it that a program may act on are attributes, each `None`
where it does not apply: `topic` and `partition` of every error, and those of the classes below. Message and attributes
survive copying, and pickling to and from another process.
"""

from __future__ import annotations

import copy
from typing import Self


class ForebayError(Exception):
    """The root of the tree above. `topic` is `namespace/topic`; `partition` is the number of the partition."""

    def __init__(self, *args: object, topic: object = None, partition: int | None = None, shard: object = None) -> None:
        """The message, and what it is about. `shard` names topic and partition at once: `shop/orders[3]`.

        All fields stand in `__dict__`, which exceptions take along when they are copied or pickled: a subclass
        takes its fields as keywords with defaults, for it is made again from its positional arguments alone.
        """
        super().__init__(*args)
        if shard is not None:
            topic, _, number = str(shard).removesuffix("]").partition("[")
            partition = int(number) if number.isdecimal() else None
        self.topic = None if topic is None else str(topic)
        self.partition = partition

    @property
    def detail(self) -> dict[str, object]:
        """The attributes that apply, by name: plain values, for programs in this or another process."""
        return {name: value for name, value in vars(self).items() if value is not None and not name.startswith("_")}

    def restated(self, message: str) -> Self:
        """The same error, with its attributes, in other words."""
        again = copy.copy(self)
        again.args = (message,)
        return again


class Invalid(ForebayError):
    """The call itself is wrong; nothing was done."""


class UnknownTopic(Invalid):
    """There is no such topic."""


class Unsupported(Invalid):
    """Not offered in this configuration."""


class UnsupportedFormat(Unsupported):
    """The bytes were written by a newer version."""


class Conflict(ForebayError):
    """The request contradicts what is stored. `expected` is the sequence or the offset that it would not."""

    def __init__(
        self,
        *args: object,
        topic: object = None,
        partition: int | None = None,
        shard: object = None,
        producer: int | None = None,
        sequence: int | None = None,
        expected: int | None = None,
    ) -> None:
        super().__init__(*args, topic=topic, partition=partition, shard=shard)
        self.producer = producer
        self.sequence = sequence
        self.expected = expected


class Unavailable(ForebayError):
    """Not possible now; nothing was done."""


class Full(Unavailable):
    """A cap of the topic leaves no room for the append."""


class Moved(Unavailable):
    """Another owner holds the shard. `holder` is the id of the data directory that has its log files, if known."""

    def __init__(
        self,
        *args: object,
        topic: object = None,
        partition: int | None = None,
        shard: object = None,
        holder: str | None = None,
    ) -> None:
        super().__init__(*args, topic=topic, partition=partition, shard=shard)
        self.holder = holder


class Indeterminate(ForebayError):
    """The outcome is unknown; it happened once or not at all."""


class Closed(ForebayError):
    """The handle has ended."""


class Fenced(Closed):
    """A newer epoch owns the shard."""


class Corrupt(ForebayError):
    """Stored bytes are damaged or contradict each other."""


class DataLoss(Corrupt):
    """A reader met a lost or damaged range: offsets `[start, stop)`, and why they cannot be read."""

    def __init__(
        self,
        *args: object,
        topic: object = None,
        partition: int | None = None,
        shard: object = None,
        start: int | None = None,
        stop: int | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(*args, topic=topic, partition=partition, shard=shard)
        self.start = start
        self.stop = stop
        self.reason = reason
