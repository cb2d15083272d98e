"""Mend each copy of a piece of history from the other: local files from the store, objects from local files.

First a plan, made from the same examination that `verify` makes; then it is carried out, if asked to. Only bytes
with the catalogued content hash are copied anywhere. What is replaced is kept in the shard's `aside/`. May be
interrupted anywhere and repeated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from forebay.blobs import BlobStore
from forebay.disk import Disk, replace_file, write_all
from forebay.errors import Conflict, Corrupt, ForebayError
from forebay.format.checksum import ContentHash
from forebay.format.files.segment import HEADER_BYTES, decode_header, index_name
from forebay.format.frame.head import Verdict
from forebay.format.index import sections as index_format
from forebay.format.metadata.descriptor import DescriptorKind
from forebay.inspection.directory import ExpectedShard
from forebay.inspection.findings import Report
from forebay.inspection.history.catalog import HistoryPlaces
from forebay.inspection.history.exam import HistoryExam, LocalFiles
from forebay.inspection.history.objects import ObjectCopy, catalogued_index
from forebay.inspection.repair.manifests import ListedEtags
from forebay.inspection.segments import log_file
from forebay.inspection.steps import CHANGES, Action, Aside, Step
from forebay.inspection.verify.shard import Progress, ShardExam
from forebay.wal.recovery.survey import TEMPORARY_SUFFIX
from forebay.wal.sealing import index_of

CHUNK_BYTES = 4 * 1024 * 1024


class Mended(NamedTuple):
    """The steps; and the local files that are sound once they are done, each with what its index will hold."""

    steps: list[Step]
    files: dict[str, bytes]


class _Work(NamedTuple):
    step: Step
    do: Callable[[Step], None] | None = None


class HistoryMending:
    """The mending of one shard, which no other process may have open here."""

    def __init__(self, place: ExpectedShard, history: HistoryPlaces, *, disk: Disk, on_bytes: Progress | None) -> None:
        self._place = place
        self._history = history
        self._disk = disk
        self._on_bytes = on_bytes
        self._aside = Aside(disk, place.directory)
        self._files: dict[str, bytes] = {}
        self._listed = ListedEtags(history)

    def run(self, *, apply: bool) -> Mended:
        """The steps that are needed; with `apply`, carried out."""
        plan = list(self.plan())
        steps = [self._done(work) if apply else work.step for work in plan]
        for name, offsets, why in self._listed.record():
            text = f"{Action.RECORD}: what it lists has other etags now: {why}"
            steps.append(self._step(Action.CANNOT, name, text, offsets=offsets))
        return Mended(steps, self._files)

    def _done(self, work: _Work) -> Step:
        if work.do is None:
            return work.step
        try:
            work.do(work.step)
        except (ForebayError, OSError) as error:
            return msgspec.structs.replace(work.step, action=Action.CANNOT, why=f"{work.step.action}: {error}")
        return msgspec.structs.replace(work.step, done=work.step.action in CHANGES)

    def plan(self) -> Iterator[_Work]:
        exam = ShardExam(
            self._disk, self._place, None, Report(), owned=False, history=self._history, on_bytes=self._on_bytes
        )
        exam.run()
        if exam.history is None:
            return
        for bad in exam.found.bad:
            yield _Work(self._step(Action.CANNOT, bad.key, f"{bad.error}; restore the metadata store from a backup"))
        for descriptor, why in exam.history.lost:
            key = f"{self._place.directory}/{descriptor.object_key.rpartition('/')[2]}"
            offsets = (descriptor.start, descriptor.end)
            yield _Work(self._step(Action.CANNOT, key, f"{why}, and there is no other copy", offsets=offsets))
        known = {descriptor.start for descriptor, _ in exam.history.lost}
        for start, stop in exam.local.missing:
            if start not in known and not exam.history.is_held((start, stop)):
                why = "no file has these offsets, and no sound object has all of them"
                yield _Work(self._step(Action.CANNOT, self._place.directory, why, offsets=(start, stop)))
        owner = exam.found.state.owner if exam.found.state is not None else None
        refusal = None
        if owner is not None and self._history.metadata.session_alive(owner):
            holder = exam.found.state.holder if exam.found.state is not None else None
            refusal = f"the shard is owned by the living session {owner} in {holder}: close it there first"
        yield from self._copies(exam.history, exam.local, refusal)

    def _copies(self, history: HistoryExam, local: LocalFiles, refusal: str | None) -> Iterator[_Work]:
        for first, last, count in history.unreached():
            offsets = (first.offsets[0], last.offsets[1])
            yield _Work(self._step(Action.CANNOT, f"{count} objects", first.flaw, offsets=offsets))
        for copy in history.copies:
            if not copy.reachable:
                continue
            if copy.intact and copy.index:
                yield from self._local(copy, local)
            for work in self._object(copy, local):
                if work.do is not None and refusal is not None:
                    yield _Work(msgspec.structs.replace(work.step, action=Action.CANNOT, why=refusal, set_aside=""))
                else:
                    yield work

    def _local(self, copy: ObjectCopy, local: LocalFiles) -> Iterator[_Work]:
        """The local file of an object that is sound; a Parquet segment is the copy of none."""
        if not copy.name:
            return
        file = next((file for file in local.files if file.name == copy.name), None)
        if file is not None and file.content_hash == copy.descriptor.content_hash:
            return
        is_there = copy.name in local.names
        if not is_there and not any(start <= copy.descriptor.start < stop for start, stop in local.missing):
            return
        path = f"{self._place.directory}/{copy.name}"
        witness = self._witness(path, local)
        if witness is not None and witness != copy.descriptor.content_hash:
            why = "its index is of other content than the history has; find out which is right"
            yield _Work(self._step(Action.CANNOT, path, why, offsets=copy.offsets))
            return
        self._files[copy.name] = copy.index
        why = f"it is {'damaged' if is_there else 'missing'}, and {copy.where} is sound"
        aside = self._aside.free(copy.name) if is_there else ""
        step = self._step(Action.FETCH, path, why, offsets=copy.offsets, aside=aside)
        yield _Work(step, lambda step: self._fetch(copy, step))

    def _witness(self, path: str, local: LocalFiles) -> str | None:
        """The content that the local index speaks of, if it is sound."""
        if index_name(path).rpartition("/")[2] not in local.names:
            return None
        footer = index_format.decode_footer(self._content(index_name(path)))
        return None if isinstance(footer, Verdict) else footer.content_hash.hex()

    def _object(self, copy: ObjectCopy, local: LocalFiles) -> Iterator[_Work]:
        """An object that is not as it should be."""
        key = copy.descriptor.object_key
        if not copy.intact:
            file = local.twin_of(copy.descriptor)
            # If its bytes are right and it is not intact, it is the catalog that is wrong.
            if file is None or copy.index or copy.descriptor.kind is not DescriptorKind.FRAMES:
                why = f"{copy.flaw}, and there is no other sound copy"
                yield _Work(self._step(Action.CANNOT, copy.where, why, offsets=copy.offsets))
                return
            path = f"{self._place.directory}/{file.name}"
            why = f"{copy.flaw}, and {path} is sound"
            aside = self._aside.free(key.rpartition("/")[2]) if copy.exists else ""
            step = self._step(Action.UPLOAD, copy.where, why, offsets=copy.offsets, aside=aside)
            yield _Work(step, lambda step: self._upload(copy, path, step))
        elif copy.index and not copy.index_intact:
            why = "it does not fit its segment" if copy.index_exists else "it is missing"
            index = copy.descriptor.index_object
            aside = self._aside.free(index.rpartition("/")[2]) if copy.index_exists else ""
            where = f"{copy.where.removesuffix(key)}{index}"
            step = self._step(Action.REBUILD_INDEX, where, why, offsets=copy.offsets, aside=aside)
            yield _Work(step, lambda step: self._upload_index(copy, copy.index, step.set_aside))
        if copy.intact and copy.has_other_etag:
            why = f"its etag is {copy.etag}, catalogued with {copy.descriptor.etag}; its bytes are sound"
            step = self._step(Action.RECORD, copy.where, why, offsets=copy.offsets)
            yield _Work(step, lambda step: self._record(copy, copy.etag))

    def _fetch(self, copy: ObjectCopy, step: Step) -> None:
        """On return the file has the catalogued bytes and the index that fits them, both durable."""
        descriptor = copy.descriptor
        chunks = self._store(copy).read(descriptor.object_key, 0, descriptor.bytes, chunk_bytes=CHUNK_BYTES)
        temporary = step.file + TEMPORARY_SUFFIX
        self._write(temporary, chunks, descriptor.content_hash)
        self._keep(step.file, step.set_aside)
        # Commit point: the name leads to the sound bytes.
        self._disk.rename(temporary, step.file)
        self._disk.sync_directory(self._place.directory)
        index = index_name(step.file)
        if not self._disk.exists(index):
            replace_file(self._disk, index, copy.index)
        elif self._content(index) != copy.index:
            self._keep(index, self._aside.free(index.rpartition("/")[2]))
            replace_file(self._disk, index, copy.index)

    def _upload(self, copy: ObjectCopy, path: str, step: Step) -> None:
        """On return the object and its index are those of the local file, and the catalog knows its etag."""
        descriptor, store = copy.descriptor, self._store(copy)
        with contextlib.closing(self._disk.open(path)) as file:
            header = decode_header(file.read_at(HEADER_BYTES, 0))
            assert not isinstance(header, Verdict), "it was examined"
            log = log_file(file, header, end=header.start + descriptor.end - descriptor.start, limit=descriptor.bytes)
            index, footer = index_of(log)
            if footer.content_hash.hex() != descriptor.content_hash:
                raise Corrupt(f"{path} has changed meanwhile")
            if step.set_aside:
                self._keep_object(store, descriptor.object_key, step.set_aside)
            places = range(0, descriptor.bytes, CHUNK_BYTES)
            chunks = (file.read_at(min(CHUNK_BYTES, descriptor.bytes - place), place) for place in places)
            stat = store.upload(descriptor.object_key, chunks)
        if not copy.index_intact:
            name = descriptor.index_object.rpartition("/")[2]
            index = catalogued_index(index, descriptor)
            self._upload_index(copy, index, self._aside.free(name) if copy.index_exists else "")
        if stat.etag != descriptor.etag:
            self._record(copy, stat.etag)

    def _upload_index(self, copy: ObjectCopy, content: bytes, aside: str) -> None:
        store, key = self._store(copy), copy.descriptor.index_object
        if aside:
            self._keep_object(store, key, aside)
        store.upload(key, [content])

    def _record(self, copy: ObjectCopy, etag: str | None) -> None:
        """On return the catalog names the object as it is now, or will once the manifest that lists it is replaced."""
        if not copy.piece.revision:
            self._listed.note(copy.descriptor, etag)
            return
        renewed = msgspec.structs.replace(copy.descriptor, etag=etag)
        if not self._history.catalog.replace([copy.piece], renewed):
            raise Conflict("the catalog has changed meanwhile: run it again")

    def _keep_object(self, store: BlobStore, key: str, aside: str) -> None:
        """Copy what an object holds before it is replaced."""
        stat = store.stat(key)
        if stat is None:
            return
        self._aside.make()
        temporary = aside + TEMPORARY_SUFFIX
        self._write(temporary, store.read(key, 0, stat.size, chunk_bytes=CHUNK_BYTES), None)
        self._disk.rename(temporary, aside)
        self._disk.sync_directory(self._aside.directory)

    def _keep(self, path: str, aside: str) -> None:
        """A second name for what is about to be replaced, so that the first is never missing."""
        if aside:
            self._aside.make()
            self._disk.link(path, aside)
            self._disk.sync_directory(self._aside.directory)

    def _write(self, path: str, chunks: Iterable[bytes], expected: str | None) -> None:
        """A new file with these bytes, durable; nothing of it stays if they do not have the hash expected."""
        if self._disk.exists(path):
            self._disk.unlink(path)
        file, digest, position = self._disk.create(path), ContentHash(), 0
        try:
            for chunk in chunks:
                write_all(file, chunk, position)
                digest.update(chunk)
                position += len(chunk)
            if expected is not None and digest.digest().hex() != expected:
                raise Corrupt(f"what was fetched for {path} is not what was catalogued")
            file.sync()
        except BaseException:
            with contextlib.suppress(OSError):
                self._disk.unlink(path)
            raise
        finally:
            file.close()

    def _store(self, copy: ObjectCopy) -> BlobStore:
        return self._history.stores.of(copy.descriptor.store)

    def _content(self, path: str) -> bytes:
        with contextlib.closing(self._disk.open(path)) as file:
            return file.read_at(file.size(), 0)

    def _step(
        self, action: Action, file: str, why: str, *, offsets: tuple[int, int] | None = None, aside: str = ""
    ) -> Step:
        return Step(action=action, shard=self._place.name, file=file, why=why, offsets=offsets, set_aside=aside)
