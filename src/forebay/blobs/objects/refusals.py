"""What an error of the library means: which of our errors it is, and whether the request may have been done.

Messages pass on the first line only, without queries, without a user's part of an address, and without anything the
settings keep secret.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable

from obstore import exceptions

from forebay.blobs.seam import Denied
from forebay.errors import ForebayError, Unavailable, Unsupported

LIBRARY_ERRORS = (exceptions.BaseError, FileNotFoundError, ValueError)
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_QUERY = re.compile(r"\?[^\s,]*")
_USER = re.compile(r"://[^/\s]*@")
_MESSAGE_LENGTH_MAX = 400
_FINAL_WORDS = ("redirect without LOCATION", "Wanted range starting at")
HIDDEN = "(hidden)"


class Refusal(enum.Enum):
    """What the store's answer, or its silence, says about a request."""

    MISSING = "no such object"
    EXISTS = "the key is taken"
    CHANGED = "another object than asked for"
    DENIED = "not allowed"
    FINAL = "refused for good"
    THROTTLED = "refused for now, nothing done"
    UNREACHED = "never reached the store"
    UNKNOWN = "it may or may not have been done"


_BY_STATUS = {
    401: Refusal.DENIED,
    403: Refusal.DENIED,
    404: Refusal.MISSING,
    408: Refusal.UNKNOWN,
    429: Refusal.THROTTLED,
    503: Refusal.THROTTLED,
}
_BY_CLASS: tuple[tuple[type[Exception], Refusal], ...] = (
    (FileNotFoundError, Refusal.MISSING),
    (exceptions.AlreadyExistsError, Refusal.EXISTS),
    (exceptions.PreconditionError, Refusal.CHANGED),
    (exceptions.PermissionDeniedError, Refusal.DENIED),
    (exceptions.UnauthenticatedError, Refusal.DENIED),
    (exceptions.NotSupportedError, Refusal.FINAL),
    (exceptions.InvalidPathError, Refusal.FINAL),
    (exceptions.UnknownConfigurationKeyError, Refusal.FINAL),
)


def classify(error: Exception) -> Refusal:
    """What `error` says about the request that raised it. In doubt, it may have been done."""
    for kind, refusal in _BY_CLASS:
        if isinstance(error, kind):
            return refusal
    text = str(error)
    status = _STATUS.search(text)
    if status is not None:
        number = int(status[1])
        return _BY_STATUS.get(number, Refusal.FINAL if number < 500 else Refusal.UNKNOWN)
    # The library distinguishes these two only in its long text. A connection that was never made carried nothing.
    if "kind: Connect," in text:
        return Refusal.UNREACHED
    return Refusal.FINAL if any(words in text for words in _FINAL_WORDS) else Refusal.UNKNOWN


def named(error: Exception, store: str, doing: str, secrets: Iterable[str]) -> ForebayError:
    """The error of ours for a request that was not done, or whose repetition does no harm."""
    refusal = classify(error)
    text = text_of(error, secrets)
    if refusal is Refusal.DENIED:
        return Denied(
            f"{store} does not let us {doing} ({text}): look at store.options, the service's own variables, "
            "and the rights of that account"
        )
    if refusal is Refusal.MISSING:
        return Unavailable(f"{store} cannot {doing} ({text}): does the bucket exist?")
    if isinstance(error, exceptions.NotSupportedError):
        return Unsupported(f"{store} cannot {doing} ({text}): take another store")
    if refusal is Refusal.THROTTLED:
        return Unavailable(f"{store} is asking for fewer requests and cannot {doing} ({text}): try again later")
    return Unavailable(f"{store} cannot {doing} ({text}): try again")


def text_of(error: Exception, secrets: Iterable[str]) -> str:
    """The first line of what the library says, fit for a log."""
    text = _USER.sub(f"://{HIDDEN}@", _QUERY.sub("?…", str(error).split("\n", 1)[0]))
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text[:_MESSAGE_LENGTH_MAX]
