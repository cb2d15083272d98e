"""Stores and metadata that fail in the middle of an export: repeated until done, it leaves one true history."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from forebay.blobs import Stat
from forebay.catalog import ShardCatalog
from forebay.errors import Corrupt, Unavailable
from forebay.format.descriptor import DescriptorKind
from forebay.format.segment import index_name
from forebay.records import Bytes
from forebay.testing.blobs import SimulatedBlobs
from forebay.testing.metadata import Fault as MetadataFault
from forebay.testing.metadata import FaultyMetadata
from tests.history.house import KEYS, TOPIC, House, expected, history_of, stream

DAY_MS = 86_400_000


def _one_file(blobs: SimulatedBlobs | None = None) -> House:
    house = House(blobs=blobs)
    house.append(10)
    house.seal()
    return house


@pytest.mark.parametrize("part", ["segment", "index"])
def test_what_stands_under_the_key_already_is_compared_by_content(part: str) -> None:
    house = _one_file()
    house.export()
    key = house.catalog().descriptors()[0].object_key
    key = index_name(key) if part == "index" else key
    whole = house.store.get_range(key, 0, 1 << 20)
    again = _one_file()
    again.store.put_if_absent(key, whole[:-1] + bytes([whole[-1] ^ 1]))

    again.export()

    assert again.store.get_range(key, 0, 1 << 20) == whole
    with history_of(again) as history:
        assert stream(history) == expected(0, 10)


class _DecayingBlobs(SimulatedBlobs):
    """The disk damages the file just before it is uploaded."""

    house: House

    def upload(self, key: str, source: Iterable[Bytes]) -> Stat:
        self.house.disk.open(self.house.shard.wal.files.all[0].path, writable=True).write_at(b"!", 200)
        return super().upload(key, source)


def test_what_is_uploaded_is_what_was_checked() -> None:
    blobs = _DecayingBlobs()
    blobs.house = _one_file(blobs)

    with pytest.raises(Corrupt, match="not exported"):
        blobs.house.export()

    assert blobs.contents == {}
    assert blobs.house.catalog().descriptors() == []


def test_an_object_that_a_late_transaction_may_yet_name_is_not_swept() -> None:
    house = _one_file()
    faulty = FaultyMetadata(house.memory)
    faulty.inject(MetadataFault.TIME_OUT, count=100)
    with pytest.raises(Unavailable):
        house.exporter(catalog=house.catalog(faulty)).export(house.shard.wal.files)
    house.clock.jump(DAY_MS)

    swept = house.exporter().sweep(3600, house.shard.wal.files)
    faulty.land()

    assert swept == []
    with history_of(house) as history:
        assert stream(history) == expected(0, 10)


def test_the_object_of_a_manifest_is_not_swept() -> None:
    house = _one_file()
    house.export()
    [inner] = house.catalog().descriptors()
    manifest = msgspec.structs.replace(
        inner, kind=DescriptorKind.MANIFEST, object_key=f"{TOPIC}_0/manifest-1", content_hash="ef" * 16
    )
    house.store.put_if_absent(manifest.object_key, b"what it lists")
    catalog = ShardCatalog(house.memory, KEYS, TOPIC, manifest=lambda _: [inner])
    assert catalog.replace(catalog.pieces(), manifest)
    house.clock.jump(DAY_MS)

    assert house.exporter(catalog=catalog).sweep(3600, house.shard.wal.files) == []
