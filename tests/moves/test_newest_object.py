"""The newest object of a history is damaged, replaced or gone: the topic opens, or the error names a next step."""

from __future__ import annotations

import pytest

from forebay import Conflict, Corrupt
from forebay.blobs import BlobStore
from forebay.catalog import ShardCatalog
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.manifests import write
from forebay.storage import Storage
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from tests.support.environments.directories import TOPIC, Environment, id_of, keys_of, metadata_of

HARM = ["missing", "replaced", "shorter", "flipped"]
APPENDS = 12


def _filled(environment: Environment) -> None:
    """A topic of one producer, sealed by the directory A, with all of it in the store."""
    with environment.open("A") as a, environment.open("B") as b:
        topic = a.create_topic(TOPIC, durability="disk")
        for sequence in range(APPENDS):
            topic.append(b"%d" % sequence * 500, producer=7, sequence=sequence)
        a.seal_topic(TOPIC, target=id_of(b))


def _catalog(log: Storage) -> ShardCatalog:
    topic = log.topic(TOPIC)
    return ShardCatalog(
        metadata_of(log), keys_of(log, topic), topic.spec.topic_id, inside(log).places.manifest, clock=ManualClock()
    )


def _store(log: Storage, descriptor: SegmentDescriptor) -> BlobStore:
    return inside(log).places.store_of(descriptor.store)


def _harm(store: BlobStore, descriptor: SegmentDescriptor, harm: str) -> bytes:
    """What it was."""
    content = b"".join(store.read(descriptor.object_key, 0, descriptor.bytes))
    store.delete(descriptor.object_key)
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 1
    changed = {"replaced": content[::-1], "shorter": content[:-16], "flipped": bytes(damaged)}
    if harm != "missing":
        store.upload(descriptor.object_key, [changed[harm]])
    return content


@pytest.mark.slow
@pytest.mark.parametrize("harm", HARM)
def test_a_segment_does_not_keep_its_topic_closed(environment: Environment, harm: str) -> None:
    """Appends go on; only what needs the object is refused, by name, and what the operator accepts goes on."""
    _filled(environment)
    with environment.open("B") as b:
        newest = _catalog(b).descriptors()[-1]
        _harm(_store(b, newest), newest, harm)

        topic = b.topic(TOPIC)
        assert topic.append(b"plain") == APPENDS
        with pytest.raises(Conflict, match="is not known, because the log or its history is damaged.*accept_damage"):
            topic.append(b"again", producer=8, sequence=0)
        with pytest.raises(Corrupt, match="forebay (verify|repair)|damaged"):
            list(topic.read(0))
        b.export_topic(TOPIC, accept_damage=True)
        assert topic.append(b"new", producer=8, sequence=0) == APPENDS + 1


@pytest.mark.slow
@pytest.mark.parametrize("harm", HARM)
def test_a_manifest_is_named_with_the_next_step_and_the_topic_opens_once_it_is_restored(
    environment: Environment, harm: str
) -> None:
    """It comes out as damage and not as a conflict; the shard is given back, so that another directory can try."""
    _filled(environment)
    with environment.open("A") as a:
        catalog = _catalog(a)
        pieces = catalog.pieces()
        inner = [piece.descriptor for piece in pieces]
        store = _store(a, inner[-1])
        listed = write(store, "manifests/", inner, store_name=inner[-1].store, created_at=1)
        assert catalog.replace(pieces, listed)
    with environment.open("B") as b:
        store = _store(b, listed)
        content = _harm(store, listed, harm)

        with pytest.raises(Corrupt, match=r'its manifest manifests/.* restore that object, and run "forebay verify"'):
            b.topic(TOPIC).append(b"plain")

        store.delete(listed.object_key)
        store.upload(listed.object_key, [content])
        assert b.topic(TOPIC).append(b"plain") == APPENDS
        assert [record.offset for record in b.topic(TOPIC).read(0)] == list(range(APPENDS + 1))
