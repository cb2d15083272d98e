"""History whose objects were copied, mended or indexed again: a reader goes on by what is named now."""

from __future__ import annotations

import itertools
from typing import Final

import msgspec
import pytest

from forebay.blobs import BlobStore
from forebay.blobs.directory import DirectoryStore
from forebay.errors import Corrupt
from forebay.format.files.segment import index_name
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.history import History, InHistory, Objects
from forebay.sealed import SealedSegment
from tests.history.house import House, expected, stream

OTHER: Final = "/other"


class Stores:
    """Two stores by the names that descriptors call them."""

    def __init__(self, house: House) -> None:
        house.disk.make_directory(OTHER)
        self.other = DirectoryStore(OTHER, disk=house.disk, clock=house.clock).open()
        self._stores: dict[str, BlobStore] = {"directory": house.store, "other": self.other}

    def segment(self, descriptor: SegmentDescriptor) -> SealedSegment:
        return Objects(self._stores[descriptor.store]).segment(descriptor)


@pytest.fixture
def house() -> House:
    house = House()
    house.append(20)
    house.seal()
    house.export()
    return house


def _renew(house: House, **changes: object) -> SegmentDescriptor:
    """The catalog names the only piece with these changes; how it was named before."""
    piece = house.catalog().pieces()[0]
    assert house.catalog().replace([piece], msgspec.structs.replace(piece.descriptor, **changes))
    return piece.descriptor


def _copied(source: BlobStore, key: str, target: BlobStore, name: str) -> None:
    stat = source.stat(key)
    assert stat is not None
    target.upload(name, [source.get_range(key, 0, stat.size)])


def test_an_object_that_was_mended_is_read_by_its_new_etag(house: House) -> None:
    sound = _renew(house, etag="another").etag
    history = History(house.catalog(), Stores(house).segment)
    with pytest.raises(Corrupt, match="forebay verify"):
        history.read(0)

    _renew(house, etag=sound)

    assert stream(history) == expected(0, 20)


def test_an_object_that_was_copied_elsewhere_under_its_name_is_read_there(house: House) -> None:
    stores = Stores(house)
    history = History(house.catalog(), stores.segment)
    assert stream(history) == expected(0, 20)
    key = house.catalog().pieces()[0].descriptor.object_key
    for name in (key, index_name(key)):
        _copied(house.store, name, stores.other, name)
    _renew(house, store="other")
    for name in (key, index_name(key)):
        house.store.delete(name)

    assert stream(history) == expected(0, 20)


def test_an_index_that_was_made_anew_is_looked_into_where_it_lies(house: House) -> None:
    history = History(house.catalog(), Stores(house).segment)

    def totals() -> object:
        (span,) = history.cover(0, 20)
        assert isinstance(span.tier, InHistory)
        found = span.tier.open().totals()
        return None if found is None else found.tolist()

    before = totals()
    assert before
    key = index_name(house.catalog().pieces()[0].descriptor.object_key)
    _copied(house.store, key, house.store, f"{key}.1")
    _renew(house, index_key=f"{key}.1")
    house.store.delete(key)
    history.refresh()

    assert totals() == before
    assert stream(history) == expected(0, 20)


@pytest.mark.parametrize("swaps", [1, 3])
def test_a_read_under_which_objects_are_replaced_again_and_again_goes_on(house: House, swaps: int) -> None:
    stores, left, names = Stores(house), [swaps], itertools.count()

    def swapped(descriptor: SegmentDescriptor) -> SealedSegment:
        """Before it is read, what was opened is replaced by the same bytes under another name."""
        segment, key = stores.segment(descriptor), descriptor.object_key
        if left[0]:
            left[0] -= 1
            name = f"{key.partition('.')[0]}.{next(names)}.seg"
            _copied(house.store, key, house.store, name)
            _copied(house.store, index_name(key), house.store, index_name(name))
            _renew(house, object_key=name)
            house.store.delete(key)
            house.store.delete(index_name(key))
        return segment

    assert History(house.catalog(), swapped).read(0).next == 20
    left[0] = swaps
    assert History(house.catalog(), swapped).offset_at_time(1_007) == 7
    assert left == [0]


@pytest.mark.parametrize("suffix", ["segment", "index"])
def test_an_object_that_is_not_there_is_named_by_every_look_with_what_to_do(house: House, suffix: str) -> None:
    key = house.catalog().pieces()[0].descriptor.object_key
    house.store.delete(key if suffix == "segment" else index_name(key))
    history = History(house.catalog(), Stores(house).segment)

    with pytest.raises(Corrupt, match='offset 3 is not there: .*run "forebay verify"'):
        history.read(3)
    with pytest.raises(Corrupt, match='time 1007 is not there: .*run "forebay verify"'):
        history.offset_at_time(1_007)
