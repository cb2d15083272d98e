"""New etags of objects that a manifest lists: the manifest is never changed, so another one takes its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from forebay import manifests
from forebay.catalog.shard import Piece
from forebay.errors import Conflict, ForebayError
from forebay.format.metadata.descriptor import DescriptorKind, SegmentDescriptor
from forebay.inspection.history.catalog import HistoryPlaces


class Unlisted(NamedTuple):
    """What could not be replaced, a manifest or the whole catalog, and why."""

    name: str
    offsets: tuple[int, int] | None
    why: str


class ListedEtags:
    """Collects etags, so that each manifest is written once however many of its objects have another."""

    def __init__(self, history: HistoryPlaces) -> None:
        self._history = history
        self._etags: dict[tuple[str, int], str | None] = {}

    def note(self, listed: SegmentDescriptor, etag: str | None) -> None:
        """The object of this piece, which a manifest lists, has that etag now."""
        self._etags[listed.object_key, listed.start] = etag

    def record(self) -> Iterator[Unlisted]:
        """Name all of them in the catalog, by manifests that list them so; those for which that failed."""
        if not self._etags:
            return
        try:
            pieces = self._history.catalog.pieces()
        except (ForebayError, OSError) as error:
            yield Unlisted(str(self._history.catalog.keys), None, str(error))
            return
        for piece in pieces:
            named = piece.descriptor
            if named.kind is DescriptorKind.MANIFEST and self._is_new_in(named):
                try:
                    self._renew(piece)
                except (ForebayError, OSError) as error:
                    yield Unlisted(named.object_key, (named.start, named.end), str(error))

    def _is_new_in(self, manifest: SegmentDescriptor) -> bool:
        return any(manifest.start <= start < manifest.end for _, start in self._etags)

    def _renew(self, piece: Piece) -> None:
        old, store = piece.descriptor, self._history.stores.of(piece.descriptor.store)
        inner = manifests.ManifestReader(store)(old)
        renewed = [
            msgspec.structs.replace(one, etag=self._etags.get((one.object_key, one.start), one.etag)) for one in inner
        ]
        if renewed == list(inner):
            return
        folder = old.object_key.rpartition("/")[0]
        listed = manifests.write(store, f"{folder}/", renewed, store_name=old.store, created_at=old.created_at)
        # Commit point: from here on readers go by the new etags.
        if not self._history.catalog.replace([piece], msgspec.structs.replace(listed, load_id=old.load_id)):
            raise Conflict("the catalog has changed meanwhile: run it again")
