"""A bucket as a `BlobStore`: creates once, uploads in parts, reads by range.

Reads, lists and uploads are repeated by the library itself. A create is not: if its answer got lost, a repeated
one would get "exists" for its own work, so the repetition is done here, where the doubt is remembered.
Knows keys and bytes; knows nothing of what they mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import msgspec
import obstore

from forebay.blobs.ahead import answer_of, asked_of, fetched_ahead, spans
from forebay.blobs.objects.building import BACKOFF_S_FIRST, BACKOFF_S_MAX, Library, build, name_of, secrets_of
from forebay.blobs.objects.feeding import Feed
from forebay.blobs.objects.leftovers import Leftovers
from forebay.blobs.objects.processes import LIBRARY
from forebay.blobs.objects.refusals import LIBRARY_ERRORS, Refusal, classify, named, text_of
from forebay.blobs.seam import (
    AHEAD,
    CHUNK_BYTES,
    BlobChanged,
    BlobMissing,
    Capabilities,
    Put,
    Stat,
    check_key,
    check_prefix,
    check_range,
    is_key,
)
from forebay.clock import Clock
from forebay.errors import Closed, ForebayError, Indeterminate, Unavailable, Unsupported
from forebay.locks import Rank, RankedLock
from forebay.records import Bytes
from forebay.settings import StoreSettings

if TYPE_CHECKING:
    # Types only: the library does not offer them when it runs.
    from obstore import GetOptions, ObjectMeta, PutResult

LIST_PAGE = 1000
_IN_DOUBT = frozenset({Refusal.UNKNOWN})
_WORTH_REPEATING = frozenset({Refusal.UNKNOWN, Refusal.THROTTLED, Refusal.UNREACHED})


def open_objects(settings: StoreSettings, *, clock: Clock) -> ObjectStore:
    """The store of these settings. Makes no request."""
    LIBRARY.begin()
    store = build(settings, retries=settings.retries_max)
    once = store if settings.backend == "memory" else build(settings, retries=0)
    return ObjectStore(settings, store, once, clock=clock)


class ObjectStore:
    """A `BlobStore` in a bucket. Shows no secrets, and is neither pickled nor carried through a fork."""

    def __init__(self, settings: StoreSettings, store: Library, once: Library, *, clock: Clock) -> None:
        self.name = name_of(settings)
        self._settings = settings
        self._secrets = secrets_of(settings)
        self._store = store
        self._once = once
        self._clock = clock
        self._lock = RankedLock(Rank.STORE, "blobs.pool")
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"ObjectStore({self.name})"

    def __reduce__(self) -> NoReturn:
        raise Unsupported(f"{self.name} cannot be pickled: send its settings without secrets and open it there")

    def put_if_absent(self, key: str, data: Bytes) -> Put:
        return self._created(key, data, self._unknown)

    def upload(self, key: str, source: Iterable[Bytes]) -> Stat:
        path = self._path(key)
        feed = Feed(source)
        pieces = feed.first(self._settings.part_bytes + 1)
        try:
            if feed.ended:
                done = obstore.put(self._store, path, b"".join(pieces), use_multipart=False)
            else:
                done = obstore.put(
                    self._store,
                    path,
                    feed.all(pieces),
                    use_multipart=True,
                    chunk_size=self._settings.part_bytes,
                    max_concurrency=self._settings.parts_in_flight_max,
                )
        except LIBRARY_ERRORS as error:
            if feed.failure is not None:
                raise feed.failure from None
            return self._after_failed_upload(key, feed, error)
        return self._stored(key, feed.size, done)

    def get_range(self, key: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        path = self._path(key)
        check_range(start, stop)
        if start == stop:
            return b""
        options: GetOptions = {"range": (start, stop)}
        if etag is not None:
            options["if_match"] = f'"{etag}"'
        try:
            answer = obstore.get(self._store, path, options=options)
            data = bytes(answer.bytes())
        except LIBRARY_ERRORS as error:
            return self._after_failed_read(key, start, error)
        found = _plain(answer.meta["e_tag"])
        if etag is not None and found != etag:
            raise BlobChanged(f"{self.name}: {key} is not the object it was (etag {found}, expected {etag})")
        if len(data) != min(stop, answer.meta["size"]) - start:
            raise Unavailable(f"{self.name} gave {len(data)} bytes of [{start}, {stop}) of {key}: try again")
        return data

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], *, etag: str | None = None) -> list[bytes]:
        fetch = partial(self.get_range, key, etag=etag)
        futures = [asked_of(self._threads(), fetch, start, stop) for start, stop in ranges]
        try:
            return [answer_of(future) for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def read(
        self,
        key: str,
        start: int,
        stop: int,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        ahead: int = AHEAD,
        etag: str | None = None,
    ) -> Iterator[bytes]:
        self._path(key)
        check_range(start, stop)
        pieces = spans(start, stop, chunk_bytes)
        ahead = min(ahead, self._settings.read_ahead_bytes // chunk_bytes)
        return fetched_ahead(
            lambda first, end: self.get_range(key, first, end, etag=etag), pieces, ahead=ahead, pool=self._threads
        )

    def list(self, prefix: str = "") -> Iterator[Stat]:
        self._alive()
        folder = check_prefix(prefix)
        try:
            for page in obstore.list(self._store, folder or None, chunk_size=LIST_PAGE):
                yield from (_stat(meta) for meta in page if is_key(meta["path"]))
        except LIBRARY_ERRORS as error:
            raise self._named(error, f"list {folder or 'everything'}") from None

    def stat(self, key: str) -> Stat | None:
        path = self._path(key)
        try:
            return _stat(obstore.head(self._store, path))
        except LIBRARY_ERRORS as error:
            if classify(error) is Refusal.MISSING:
                return None
            raise self._named(error, f"look at {key}") from None

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            obstore.delete(self._store, path)
        except LIBRARY_ERRORS as error:
            if classify(error) is not Refusal.MISSING:
                raise self._named(error, f"delete {key}") from None

    def probe(self, *, seconds_max: float | None = None) -> Capabilities:
        if seconds_max is not None and self._settings.backend != "memory":
            with contextlib.closing(open_objects(_within(seconds_max, self._settings), clock=self._clock)) as hasty:
                return hasty.probe()
        key = f"probe-{self._clock.random_bytes(16).hex()}"
        try:
            first = self._created(key, b"first", self._unanswered)
            second = self._created(key, b"second", self._unanswered)
            kept = self.get_range(key, 0, 16, etag=second.stat.etag)
        finally:
            # What the store does with creates is the answer that counts, also where it cannot delete.
            with contextlib.suppress(ForebayError):
                self.delete(key)
        if not first or second or kept != b"first":
            raise Unsupported(
                f"{self.name} let the same key be created twice: it ignores If-None-Match, so two writers could not "
                "be distinguished; take a store that honours it"
            )
        return Capabilities(store=self.name, exclusive_create=True)

    def abort_stale_uploads(self, older_than_s: float) -> int:
        self._alive()
        return Leftovers(self._settings, self._clock).abort(older_than_s)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _created(self, key: str, data: Bytes, in_doubt: Callable[[str, Exception], ForebayError]) -> Put:
        """As `put_if_absent`; `in_doubt` says what to raise where its outcome is unknown."""
        path = self._path(key)
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        doubt = False
        last: Exception | None = None
        for _ in self._tries():
            try:
                # Commit point: the store itself lets one create through.
                done = obstore.put(self._once, path, bytes(data), mode="create", use_multipart=False)
                return Put(True, self._stored(key, size, done))
            except LIBRARY_ERRORS as error:
                refusal, last = classify(error), error
            if refusal in (Refusal.EXISTS, Refusal.CHANGED):
                if doubt:
                    # It may be our own work, done by a request whose answer was lost.
                    break
                found = self.stat(key)
                if found is not None:
                    return Put(False, found)
                # "Conflict", and nothing there: another create or a delete is under way. It decides first.
            elif refusal not in _WORTH_REPEATING:
                break
            doubt = doubt or refusal in _IN_DOUBT
        assert last is not None
        raise (in_doubt(key, last) if doubt else self._named(last, f"put {key}")) from None

    def _after_failed_upload(self, key: str, feed: Feed, error: Exception) -> Stat:
        """What is to be said of an upload that failed: it may be there all the same, once all bytes were sent."""
        if not feed.ended or classify(error) not in (Refusal.UNKNOWN, Refusal.MISSING):
            raise self._named(error, f"upload {key}") from None
        with contextlib.suppress(ForebayError):
            found = self.stat(key)
            # Of the same size may also be what was to be replaced, as by a repair: its bytes show it.
            if (
                found is not None
                and found.size == feed.size
                and feed.is_same(self.read(key, 0, found.size, etag=found.etag))
            ):
                return found
        raise self._unknown(key, error) from None

    def _after_failed_read(self, key: str, start: int, error: Exception) -> bytes:
        """Nothing, if the range lies behind the end, which stores refuse in different words; else the named error."""
        refusal = classify(error)
        if refusal is Refusal.MISSING:
            raise BlobMissing(f"{self.name} has no object {key}") from None
        if refusal is Refusal.CHANGED:
            raise BlobChanged(f"{self.name}: {key} is not the object it was") from None
        if refusal is Refusal.FINAL:
            found = self.stat(key)
            if found is not None and found.size <= start:
                return b""
        raise self._named(error, f"read {key}") from None

    def _tries(self) -> Iterator[int]:
        """One by one, with growing pauses between them, as long as the settings allow."""
        deadline = self._clock.monotonic() + self._settings.retry_timeout_ms / 1000
        for attempt in range(self._settings.retries_max + 1):
            if attempt:
                jitter = 0.5 + self._clock.random_bytes(1)[0] / 512
                pause = min(BACKOFF_S_MAX, BACKOFF_S_FIRST * 2**attempt) * jitter
                if self._clock.monotonic() + pause > deadline:
                    return
                self._clock.sleep(pause)
            yield attempt

    def _stored(self, key: str, size: int, done: PutResult) -> Stat:
        version = done["version"]
        return Stat(key, size, _plain(done["e_tag"]), version if version != "null" else None, self._clock.now_ms())

    def _named(self, error: Exception, doing: str) -> ForebayError:
        return named(error, self.name, doing, self._secrets)

    def _unknown(self, key: str, error: Exception) -> Indeterminate:
        text = text_of(error, self._secrets)
        return Indeterminate(f"{self.name}: {key} may or may not be stored ({text}): compare what is there by content")

    def _unanswered(self, key: str, error: Exception) -> Unavailable:
        """Nothing rests on the object of a probe: all that counts is that there was no answer."""
        text = text_of(error, self._secrets)
        return Unavailable(f"{self.name} does not answer, so what it can do is not known yet ({text}): try again")

    def _threads(self) -> ThreadPoolExecutor:
        self._alive()
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._settings.parts_in_flight_max, "forebay-blobs")
            return self._pool

    def _path(self, key: str) -> str:
        self._alive()
        return check_key(key)

    def _alive(self) -> None:
        LIBRARY.begin()
        if self._closed:
            raise Closed(f"{self.name} was closed: open another")


def _within(seconds: float, settings: StoreSettings) -> StoreSettings:
    """The same store with less patience: a request, and all repetitions of one, end after so long."""
    allowed_ms = max(1, int(seconds * 1000))
    return msgspec.structs.replace(
        settings,
        request_timeout_ms=min(settings.request_timeout_ms, allowed_ms),
        retry_timeout_ms=min(settings.retry_timeout_ms, allowed_ms),
    )


def _stat(meta: ObjectMeta) -> Stat:
    modified_ms = int(meta["last_modified"].timestamp() * 1000)
    version = meta["version"]
    return Stat(meta["path"], meta["size"], _plain(meta["e_tag"]), version if version != "null" else None, modified_ms)


def _plain(etag: str | None) -> str | None:
    """Without its quotes: some lists leave them out."""
    return etag.strip('"') if etag is not None else None
