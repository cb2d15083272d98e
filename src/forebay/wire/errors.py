"""Errors on the wire: one table of error class, code and HTTP status, and the body that carries an error.

    {"error": {"code": "unknown_topic", "message": "…", "detail": {"topic": "shop/orders"}}}

The client raises the class that the broker raised, with the same message and attributes. A class without a row of its
own goes by the row of its nearest base.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from forebay.decoders import converted, decoder
from forebay.errors import (
    Closed,
    Conflict,
    Corrupt,
    DataLoss,
    Fenced,
    Forbidden,
    ForebayError,
    Full,
    Indeterminate,
    Invalid,
    Moved,
    NotReady,
    OffsetOutOfRange,
    PartitionOutcomes,
    Throttled,
    TooLarge,
    Unauthenticated,
    Unavailable,
    UnknownConsumer,
    UnknownLoad,
    UnknownRouter,
    UnknownSubscription,
    UnknownTopic,
    Unsupported,
    UnsupportedFormat,
)

NO_ROUTE: Final = "no_route"
"""The code of an answer to an address that a broker does not have."""
NO_METHOD: Final = "no_method"
"""The code of an answer to a method that a broker does not offer at that address."""
RETRY_SECONDS: Final = 1
"""When to try again, where the error does not say."""


class ErrorRow(NamedTuple):
    """How one class of errors is sent."""

    kind: type[ForebayError]
    code: str
    status: int
    retries: bool = False
    """Whether the answer says when to try again (`Retry-After`)."""


ERROR_TABLE: Final = (
    ErrorRow(Invalid, "invalid", 400),
    ErrorRow(OffsetOutOfRange, "offset_out_of_range", 400),
    ErrorRow(Unauthenticated, "unauthenticated", 401),
    ErrorRow(Forbidden, "forbidden", 403),
    ErrorRow(UnknownTopic, "unknown_topic", 404),
    ErrorRow(UnknownLoad, "unknown_load", 404),
    ErrorRow(UnknownRouter, "unknown_router", 404),
    ErrorRow(UnknownSubscription, "unknown_subscription", 404),
    ErrorRow(UnknownConsumer, "unknown_consumer", 404),
    ErrorRow(Conflict, "conflict", 409),
    ErrorRow(TooLarge, "too_large", 413),
    ErrorRow(Moved, "moved", 421),
    ErrorRow(Unsupported, "unsupported", 422),
    ErrorRow(UnsupportedFormat, "unsupported_format", 422),
    ErrorRow(Throttled, "throttled", 429, retries=True),
    ErrorRow(Corrupt, "corrupt", 500),
    ErrorRow(DataLoss, "data_loss", 500),
    ErrorRow(ForebayError, "internal", 500),
    ErrorRow(Unavailable, "unavailable", 503, retries=True),
    ErrorRow(NotReady, "not_ready", 503, retries=True),
    ErrorRow(Closed, "closed", 503, retries=True),
    ErrorRow(Fenced, "fenced", 503, retries=True),
    ErrorRow(Indeterminate, "indeterminate", 504),
    ErrorRow(Full, "full", 507),
)
_BY_KIND: Final = {row.kind: row for row in ERROR_TABLE}
_BY_CODE: Final = {row.code: row for row in ERROR_TABLE} | dict.fromkeys((NO_ROUTE, NO_METHOD), _BY_KIND[Unsupported])
_BY_STATUS: Final = {row.status: row for row in reversed(ERROR_TABLE)}
"""The first row of each status: what a status without a body of ours stands for."""

_PATH: Final = re.compile(r"""(?<![\w.:/-])/(?:[^\s/:;,'"()\[\]]+/){2,}(?=[^\s/:;,'"()\[\]]+)""")
"""What stands before the last part of a path of three parts or more; a topic's name has two."""
_USER: Final = re.compile(r"://[^\s/@]+@")


class SentError(NamedTuple):
    """An error as an HTTP answer: `retry_after_s` is for the header `Retry-After`, where there is one."""

    status: int
    retry_after_s: int | None
    body: bytes


class ErrorItem(msgspec.Struct):
    code: str
    message: str
    detail: dict[str, Any] = msgspec.field(default_factory=dict)


class ErrorBody(msgspec.Struct):
    error: ErrorItem


class FailedPartition(msgspec.Struct, frozen=True, kw_only=True):
    """Why the records of one partition were not appended: as an error of its own."""

    partition: int
    code: str
    message: str


class OutcomeItem(msgspec.Struct, frozen=True, kw_only=True):
    """What stands of an append to several partitions, and what does not, in the detail of its error."""

    ranges: list[tuple[int, int, int]]
    """Each a partition, the first offset, and how many records."""
    failures: list[FailedPartition]
    records: list[tuple[int, int | None]] = []
    """The partition of each record, and its offset if it stands: of an append that asks for `offsets`."""


_DECODER: Final = decoder(ErrorBody)


def row_of(kind: type[BaseException]) -> ErrorRow:
    """The row of a class, or of its nearest base that has one; that of `ForebayError` for a class of another kind."""
    return next((_BY_KIND[base] for base in kind.__mro__ if base in _BY_KIND), _BY_KIND[ForebayError])


def encode_error(error: BaseException, *, private: Iterable[str] = ()) -> SentError:
    """The answer for an error. It shows nothing of one that Forebay did not raise on purpose.

    Of the paths of this machine that a message names, the last part alone is sent. Each text of `private`, such as the
    data directory, is left out wherever it stands.
    """
    row = row_of(type(error))
    if not isinstance(error, ForebayError):
        return SentError(row.status, None, _body(row, "the broker failed: its log says why", {}))
    plain = {name: value for name, value in error.detail.items() if _is_plain(value)}
    detail = {name: _public(value, private) for name, value in plain.items()}
    if error.append_outcome is not None:
        detail["append"] = _outcome_item(error.append_outcome, private)
    after = getattr(error, "retry_after_s", None)
    seconds = math.ceil(RETRY_SECONDS if after is None else after) if row.retries else None
    return SentError(row.status, seconds, _body(row, str(_public(str(error), private)), detail))


def encode_refusal(code: str, message: str) -> bytes:
    """The body of an answer that stands for no class of errors: a request that no handler sees."""
    return msgspec.json.encode(ErrorBody(ErrorItem(code, message)))


def public_message(error: BaseException | str, *, private: Iterable[str] = ()) -> str:
    """What a caller may read of an error, or of what was noted of one, as in `encode_error`."""
    return str(_public(str(error), private))


def decode_error(status: int, body: bytes) -> ForebayError:
    """The error that an answer carries. A body that is not ours, a proxy's say, is judged by the status alone."""
    try:
        found = _DECODER.decode(body).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        shown = body[:200].decode("utf-8", "replace")
        found = ErrorItem("", f"HTTP status {status}, without an answer of Forebay's own: {shown!r}")
    row = _BY_CODE.get(found.code) or _row_of_status(status)
    error = row.kind(found.message)
    known = vars(error)
    for name, value in found.detail.items():
        if name in known and _is_plain(value):
            setattr(error, name, value)
    outcome = _outcome(found.detail.get("append"), error)
    return error if outcome is None else error.with_outcome(outcome)


def _outcome_item(outcome: PartitionOutcomes, private: Iterable[str]) -> OutcomeItem:
    failures = [
        FailedPartition(partition=number, code=row_of(type(error)).code, message=str(_public(str(error), private)))
        for number, error in sorted(outcome.failures.items())
    ]
    return OutcomeItem(ranges=list(outcome.ranges), failures=failures, records=list(outcome.records))


def _outcome(sent: object, error: ForebayError) -> PartitionOutcomes | None:
    """What the detail of an error says of the partitions of an append; `None` if it says nothing of that."""
    if sent is None:
        return None
    try:
        item = converted(sent, OutcomeItem)
    except msgspec.ValidationError:
        return None  # of another version, or of another make: the error itself stands
    failures = {failed.partition: _failed(failed, error) for failed in item.failures}
    return PartitionOutcomes(tuple(item.ranges), failures, tuple(item.records))


def _failed(failed: FailedPartition, whole: ForebayError) -> ForebayError:
    row = _BY_CODE.get(failed.code, _BY_KIND[Indeterminate])
    return row.kind(failed.message, topic=whole.topic, partition=failed.partition)


def _row_of_status(status: int) -> ErrorRow:
    """What a status stands for if the code is not known here. An outcome in doubt is not taken for a refusal."""
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    return _BY_KIND[Invalid if 400 <= status < 500 else Indeterminate]


def _body(row: ErrorRow, message: str, detail: Mapping[str, Any]) -> bytes:
    # Names of files may hold bytes that are no text: such a message must not fail to be sent.
    text = message.encode("utf-8", "replace").decode()
    return msgspec.json.encode(ErrorBody(ErrorItem(row.code, text, dict(detail))))


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float)


def _public(value: object, private: Iterable[str]) -> object:
    if not isinstance(value, str):
        return value
    for text in private:
        value = re.sub(rf"(?<![\w.-]){re.escape(text)}(?![\w.-])", "…", value)
    return _USER.sub("://", _PATH.sub("…/", value)).encode("utf-8", "replace").decode()
