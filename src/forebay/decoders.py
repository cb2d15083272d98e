"""Decoders by the type of what they decode, made by one thread at a time.

msgspec works out what a Struct class looks like when the class is first decoded into. A second thread that uses the
class at that moment reads what is not filled in yet, and the process ends with a segmentation fault (seen with 0.22).
So every typed decoding of Forebay comes through here: the first use of a type is alone, all others only look it up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar, overload

import msgspec

T = TypeVar("T")

_WAIT_S: Final = 2.0
"""A type is worked out within milliseconds. If a thread of the parent held the lock when this process was forked,
nothing gives it back: then this process goes on without it."""

_EXACT_MAX: Final = 2**53
"""Up to here a float holds every integer."""

_lock = threading.Lock()
_known: dict[tuple[Any, bool], msgspec.json.Decoder[Any]] = {}


@overload
def decoder(kind: type[T], *, strict: bool = True) -> msgspec.json.Decoder[T]: ...
@overload
def decoder(kind: Any, *, strict: bool = True) -> msgspec.json.Decoder[Any]: ...
def decoder(kind: Any, *, strict: bool = True) -> msgspec.json.Decoder[Any]:
    """The decoder of JSON into `kind`, the same one for every call. Any thread may call this, with any lock held."""
    found = _known.get((kind, strict))
    if found is None:
        with alone():
            found = _known.setdefault((kind, strict), msgspec.json.Decoder(kind, strict=strict))
    return found


def whole_numbers(content: bytes) -> bytes:
    """The same JSON with integers where numbers have a fraction of nothing: `7.0`, the same to JSON as `7`.

    For what a decoder refuses. Only numbers that a float holds exactly are changed.
    """
    return msgspec.json.encode(_whole(msgspec.json.decode(content)))


def lenient(content: bytes, decode: Callable[[bytes], T]) -> T:
    """What `decode` makes of JSON, also if integers in it are written as `7.0`."""
    try:
        return decode(content)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
    return decode(whole_numbers(content))


def _whole(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= _EXACT_MAX else value
    if isinstance(value, list):
        return [_whole(each) for each in value]
    if isinstance(value, dict):
        return {name: _whole(each) for name, each in value.items()}
    return value


def converted(value: object, kind: type[T], *, strict: bool = True) -> T:
    """A value of plain Python as a `kind`, checked as if it had been decoded."""
    decoder(kind)
    return msgspec.convert(value, kind, strict=strict)


def unpacked(content: bytes | bytearray, kind: type[T]) -> T:
    """MessagePack as a `kind`."""
    decoder(kind)
    return msgspec.msgpack.decode(content, type=kind)


@contextmanager
def alone() -> Iterator[None]:
    """No other thread works out a type meanwhile."""
    is_held = _lock.acquire(timeout=_WAIT_S)
    try:
        yield
    finally:
        if is_held:
            _lock.release()
