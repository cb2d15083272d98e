"""Which objects of a topic the snapshots of its open tables name, so that the collector keeps them.

The registration of a table first records here what its next snapshot will name, and then sees that history still names
it; the collector asks here after it has read the catalog. So an object is either found here or was gone before. A long
list lies in an object of its own. Knows the metadata store and stores; knows nothing of tables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from forebay.blobs import BlobMissing, BlobStore
from forebay.catalog.entries import decode_entry, read_or_log
from forebay.catalog.transact import Done, Write, transact
from forebay.clock import Clock
from forebay.errors import Unavailable
from forebay.format.metadata.keys import tables_key, topic_key
from forebay.format.metadata.value import Unknown, encode_value
from forebay.manifests import ManifestRef, load_value, store_value
from forebay.metadata import Absent, Compare, Delete, MetadataStore, Put, RevisionIs
from forebay.topics import TopicSpec

LOOKS: Final = 8
LISTED_MAX: Final = 500
UNREADABLE: Final = "restore the metadata store from a backup, or delete the topic; until then nothing of it is swept"
"""More lie in an object."""


class ListedObjects(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the tables of a topic name: `objects`, or those that a manifest lists."""

    topic_id: str
    objects: tuple[str, ...] = ()
    manifest: ManifestRef | None = None
    formats: tuple[str, ...] = ()
    """The formats of the tables that name some; empty where an earlier version wrote this down, which did not say."""

    @property
    def objects_at(self) -> str | None:
        """The object that lists them, if one does."""
        return self.manifest.object_key if self.manifest is not None else None


class TableObjects:
    """The objects of one topic that tables name. Stateless: every call asks the metadata store."""

    def __init__(
        self, metadata: MetadataStore, prefix: str, namespace: str, topic: str, topic_id: str, *, clock: Clock
    ) -> None:
        self._metadata = metadata
        self._key = tables_key(namespace, topic, prefix=prefix)
        self._topic_key = topic_key(namespace, topic, prefix=prefix)
        self._topic_id = topic_id
        self._clock = clock

    def objects(self, store: BlobStore) -> frozenset[str]:
        """The keys of all of them; `store` is where the list lies if it is long."""
        for _ in range(LOOKS):
            found = self._stored()[0]
            if found.manifest is None:
                return frozenset(found.objects)
            # Missing because the list was replaced meanwhile: then the value is another by now.
            with contextlib.suppress(BlobMissing):
                return frozenset(load_value(store, found.manifest, ListedObjects).objects)
        raise Unavailable(f"the list that {self._key} names is not there: nothing is swept; register the tables again")

    def formats(self) -> tuple[str, ...]:
        """The formats of the tables that name some; empty where that was not written down."""
        return self._stored()[0].formats

    def is_some(self) -> bool:
        """Whether there are any."""
        found = self._stored()[0]
        return bool(found.objects) or found.manifest is not None

    def put(
        self, keys: Iterable[str], store: BlobStore, *, formats: Iterable[str] = (), held: Sequence[Compare] = ()
    ) -> None:
        """On return exactly these are kept. A caller that names more adds to what `objects` gives; one at a time.

        `formats` are those of the tables that name them. `held` is compared too: the lease of the caller, for example.
        """
        listed, named_by = tuple(sorted(keys)), tuple(sorted(formats))
        value = ListedObjects(topic_id=self._topic_id, objects=listed, formats=named_by)
        if len(listed) > LISTED_MAX:
            ref = store_value(store, f"{self._topic_id}/tables/", value)
            value = ListedObjects(topic_id=self._topic_id, manifest=ref, formats=named_by)

        # Of every attempt: the one whose answer was lost may have replaced it.
        lists_before: set[str | None] = set()

        def change(found: tuple[ListedObjects, Unknown | None, int]) -> Write[None] | Done[None]:
            before, unknown, revision = found
            if value == before:
                return Done(None)
            lists_before.add(before.objects_at)
            put = Put(self._key, encode_value(value, unknown=unknown))
            return Write([RevisionIs(self._key, revision), *held], [put], None)

        transact(self._metadata, self._stored, change, what=f"{self._key} is not written", clock=self._clock)
        for unneeded in lists_before - {value.objects_at}:
            if unneeded is not None:
                store.delete(unneeded)

    def forget(self) -> None:
        """The topic is deleted: forget what its tables name, unless a later topic of its name has a list by now.

        A list that cannot be read goes, unless there is a later topic: its objects are gone, whichever they were.
        """
        entry = self._metadata.get(self._key)
        found = None if entry is None else read_or_log(entry, ListedObjects)
        if entry is None or (found is not None and found[0].topic_id != self._topic_id):
            return
        compares: list[Compare] = [RevisionIs(self._key, entry.mod_revision)]
        if found is None:
            compares.append(Absent(self._topic_key))
        self._metadata.transaction(compares, [Delete(self._key)])

    def _stored(self) -> tuple[ListedObjects, Unknown | None, int]:
        entry = self._metadata.get(self._key)
        nothing = ListedObjects(topic_id=self._topic_id)
        if entry is None:
            return nothing, None, 0
        found, unknown = decode_entry(entry, ListedObjects, UNREADABLE)
        # Of an earlier topic of this name: its objects are not this one's.
        return (
            (found, unknown, entry.mod_revision)
            if found.topic_id == self._topic_id
            else (nothing, None, entry.mod_revision)
        )


def tables_of(metadata: MetadataStore, prefix: str, spec: TopicSpec, clock: Clock) -> TableObjects:
    """The objects of this topic that tables name."""
    return TableObjects(metadata, prefix, spec.namespace, spec.topic, spec.topic_id, clock=clock)
