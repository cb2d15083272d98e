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
        └── DataLoss          a stream met a lost or damaged range and was not told to go on

Arguments are positional strings, so that an error survives pickling to and from another process.
"""


class ForebayError(Exception):
    """The root of the tree above."""


class Invalid(ForebayError):
    """The call itself is wrong; nothing was done."""


class UnknownTopic(Invalid):
    """There is no such topic."""


class Unsupported(Invalid):
    """Not offered in this configuration."""


class UnsupportedFormat(Unsupported):
    """The bytes were written by a newer version."""


class Conflict(ForebayError):
    """The request contradicts what is stored."""


class Unavailable(ForebayError):
    """Not possible now; nothing was done."""


class Full(Unavailable):
    """A cap of the topic leaves no room for the append."""


class Moved(Unavailable):
    """Another owner holds the shard."""


class Indeterminate(ForebayError):
    """The outcome is unknown; it happened once or not at all."""


class Closed(ForebayError):
    """The handle has ended."""


class Fenced(Closed):
    """A newer epoch owns the shard."""


class Corrupt(ForebayError):
    """Stored bytes are damaged or contradict each other."""


class DataLoss(Corrupt):
    """A reader met a lost or damaged range."""
