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
from tests.support.environments.shard import ShardEnvironment, expected, stream

OTHER: Final = "/other"


class Stores:
    """Two stores by the names that descriptors call them."""

    def __init__(self, environment: ShardEnvironment) -> None:
        environment.disk.make_directory(OTHER)
        self.other = DirectoryStore(OTHER, disk=environment.disk, clock=environment.clock).open()
        self._stores: dict[str, BlobStore] = {"directory": environment.store, "other": self.other}

    def segment(self, descriptor: SegmentDescriptor) -> SealedSegment:
        return Objects(self._stores[descriptor.store]).segment(descriptor)


@pytest.fixture
def environment() -> ShardEnvironment:
    environment = ShardEnvironment()
    environment.append(20)
    environment.seal()
    environment.export()
    return environment


def _renew(environment: ShardEnvironment, **changes: object) -> SegmentDescriptor:
    """The catalog names the only piece with these changes; how it was named before."""
    piece = environment.catalog().pieces()[0]
    assert environment.catalog().replace([piece], msgspec.structs.replace(piece.descriptor, **changes))
    return piece.descriptor


def _copied(source: BlobStore, key: str, target: BlobStore, name: str) -> None:
    stat = source.stat(key)
    assert stat is not None
    target.upload(name, [source.get_range(key, 0, stat.size)])


def test_an_object_that_was_mended_is_read_by_its_new_etag(environment: ShardEnvironment) -> None:
    sound = _renew(environment, etag="another").etag
    history = History(environment.catalog(), Stores(environment).segment)
    with pytest.raises(Corrupt, match="forebay verify"):
        history.read(0)

    _renew(environment, etag=sound)

    assert stream(history) == expected(0, 20)


def test_an_object_that_was_copied_elsewhere_under_its_name_is_read_there(environment: ShardEnvironment) -> None:
    stores = Stores(environment)
    history = History(environment.catalog(), stores.segment)
    assert stream(history) == expected(0, 20)
    key = environment.catalog().pieces()[0].descriptor.object_key
    for name in (key, index_name(key)):
        _copied(environment.store, name, stores.other, name)
    _renew(environment, store="other")
    for name in (key, index_name(key)):
        environment.store.delete(name)

    assert stream(history) == expected(0, 20)


def test_an_index_that_was_made_anew_is_looked_into_where_it_lies(environment: ShardEnvironment) -> None:
    history = History(environment.catalog(), Stores(environment).segment)

    def totals() -> object:
        (span,) = history.cover(0, 20)
        assert isinstance(span.tier, InHistory)
        found = span.tier.open().totals()
        return None if found is None else found.tolist()

    before = totals()
    assert before
    key = index_name(environment.catalog().pieces()[0].descriptor.object_key)
    _copied(environment.store, key, environment.store, f"{key}.1")
    _renew(environment, index_key=f"{key}.1")
    environment.store.delete(key)
    history.refresh()

    assert totals() == before
    assert stream(history) == expected(0, 20)


@pytest.mark.parametrize("swaps", [1, 3])
def test_a_read_under_which_objects_are_replaced_again_and_again_goes_on(
    environment: ShardEnvironment, swaps: int
) -> None:
    stores, left, names = Stores(environment), [swaps], itertools.count()

    def swapped(descriptor: SegmentDescriptor) -> SealedSegment:
        """Before it is read, what was opened is replaced by the same bytes under another name."""
        segment, key = stores.segment(descriptor), descriptor.object_key
        if left[0]:
            left[0] -= 1
            name = f"{key.partition('.')[0]}.{next(names)}.seg"
            _copied(environment.store, key, environment.store, name)
            _copied(environment.store, index_name(key), environment.store, index_name(name))
            _renew(environment, object_key=name)
            environment.store.delete(key)
            environment.store.delete(index_name(key))
        return segment

    assert History(environment.catalog(), swapped).read(0).next == 20
    left[0] = swaps
    assert History(environment.catalog(), swapped).offset_at_time(1_007) == 7
    assert left == [0]


@pytest.mark.parametrize("suffix", ["segment", "index"])
def test_an_object_that_is_not_there_is_named_by_every_look_with_what_to_do(
    environment: ShardEnvironment, suffix: str
) -> None:
    key = environment.catalog().pieces()[0].descriptor.object_key
    environment.store.delete(key if suffix == "segment" else index_name(key))
    history = History(environment.catalog(), Stores(environment).segment)

    with pytest.raises(Corrupt, match='offset 3 is not there: .*run "forebay verify"'):
        history.read(3)
    with pytest.raises(Corrupt, match='time 1007 is not there: .*run "forebay verify"'):
        history.offset_at_time(1_007)
