"""What a log says when it cannot write, or must not: which appends are certainly not in it, and which may be."""

from __future__ import annotations

from typing import NamedTuple

from forebay.errors import Fenced, ForebayError, Indeterminate, Unavailable


class Refusals(NamedTuple):
    """The errors after a write that failed half way, or came too late."""

    later: ForebayError
    written: ForebayError
    queued: ForebayError

    def unwritten(self) -> Refusals:
        """The same where no byte of any append was written."""
        return self._replace(written=self.queued)


def refusals(name: object, reason: str) -> Refusals:
    """For appends from now on, for those that were being written, and for those that waited behind them."""
    return Refusals(
        later=Unavailable(
            f"{name} is read-only since its log could not be written ({reason}); it recovers by itself", shard=name
        ),
        written=Indeterminate(
            f"{name}: the append was being written when the log failed ({reason}): it is not visible now and, "
            "should the process crash before the log recovers, may appear once; read before you repeat it",
            shard=name,
        ),
        queued=Unavailable(
            f"{name}: the append was not written, the log failed before it ({reason}); try again", shard=name
        ),
    )


def fenced(name: object, reason: str) -> Refusals:
    """The same once another owner has the shard, or may have: this log never takes an append again."""
    refusal = Fenced(
        f"{name}: not written, this owner has stopped ({reason}): open the topic again to find the next", shard=name
    )
    return Refusals(
        later=refusal,
        written=Indeterminate(
            f"{name}: the append was being written when this owner had to stop ({reason}): it may or may not be "
            "there for the next owner; read before you repeat it",
            shard=name,
        ),
        queued=refusal,
    )
