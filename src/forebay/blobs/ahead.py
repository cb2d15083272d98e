"""Reading ahead: chunks of one object in order, the next ones fetched by other threads before they are needed.

Knows a function that fetches a range and a pool to run it in. Memory is bounded by the chunks under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TypeAlias

from forebay.errors import Closed, Invalid, Unavailable

Fetch: TypeAlias = Callable[[int, int], bytes]


def spans(start: int, stop: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """The range `[start, stop)` in pieces."""
    if chunk_bytes <= 0:
        raise Invalid(f"chunks of {chunk_bytes} bytes: at least one byte is needed")
    return ((at, min(at + chunk_bytes, stop)) for at in range(start, stop, chunk_bytes))


def asked_of(pool: ThreadPoolExecutor, fetch: Fetch, start: int, stop: int) -> Future[bytes]:
    """Have the range fetched by another thread; `Closed` if the pool takes no more work."""
    try:
        return pool.submit(fetch, start, stop)
    except RuntimeError as error:
        if "shutdown" not in str(error):
            raise Unavailable(f"no thread is there to read from this store ({error}): try again") from error
        raise Closed(f"nothing is read from this store any more ({error}): open it again") from error


def answer_of(asked: Future[bytes]) -> bytes:
    """What was fetched; `Closed` if the pool was ended before."""
    try:
        return asked.result()
    except CancelledError as error:
        raise Closed("the store was closed while it was read: open it again") from error


def in_order(fetch: Fetch, pieces: Iterator[tuple[int, int]]) -> Iterator[bytes]:
    """The pieces one by one, up to the first that is short: there the object ends."""
    for start, stop in pieces:
        data = fetch(start, stop)
        if data:
            yield data
        if len(data) < stop - start:
            return


def fetched_ahead(
    fetch: Fetch, pieces: Iterator[tuple[int, int]], *, ahead: int, pool: Callable[[], ThreadPoolExecutor]
) -> Iterator[bytes]:
    """The same, with up to `ahead` pieces fetched or under way besides the one being waited for."""
    under_way: deque[tuple[int, Future[bytes]]] = deque()
    try:
        while True:
            while len(under_way) <= ahead and (piece := next(pieces, None)) is not None:
                under_way.append((piece[1] - piece[0], asked_of(pool(), fetch, *piece)))
            if not under_way:
                return
            length, future = under_way.popleft()
            data = answer_of(future)
            del future
            if data:
                yield data
            if len(data) < length:
                return
    finally:
        # What is running cannot be called back; it ends within its time-out and is forgotten.
        for _, future in under_way:
            future.cancel()
