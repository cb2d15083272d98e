"""What every `BlobStore` must do. Knows the Protocol only.

Inherit `BlobContract` and give it two fixtures: `store`, empty, and `twin`, a second handle on the same objects
(the same one will do where nothing else is possible). What a crash leaves is no part of this suite.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from forebay.blobs import BlobChanged, BlobMissing, BlobStore
from forebay.errors import Closed, Invalid

MIB = 1024 * 1024
PART = 5 * MIB


def pattern(size: int, *, seed: int = 0) -> bytes:
    """Bytes that show their own place, different for every seed."""
    block = b"".join((number * 2654435761 + seed).to_bytes(8, "little", signed=False) for number in range(1024))
    return (block * (size // len(block) + 1))[:size]


def pieces(content: bytes, size: int) -> Iterator[bytes]:
    return (content[start : start + size] for start in range(0, len(content), size))


class BlobContract:
    """The suite. A test's name is its claim."""

    def test_what_is_put_can_be_read_and_is_listed(self, store: BlobStore) -> None:
        put = store.put_if_absent("a/b/one.idx", b"hello")

        assert put
        assert put.stat.key == "a/b/one.idx"
        assert put.stat.size == 5
        assert store.get_range("a/b/one.idx", 0, 5) == b"hello"
        assert store.stat("a/b/one.idx") == put.stat._replace(modified_ms=_modified(store, "a/b/one.idx"))
        assert [stat.key for stat in store.list()] == ["a/b/one.idx"]

    def test_a_key_is_created_once_and_the_loser_learns_what_is_there(self, store: BlobStore, twin: BlobStore) -> None:
        first = store.put_if_absent("k", b"first")

        second = twin.put_if_absent("k", b"second, longer")

        assert first
        assert not second
        assert (second.stat.size, second.stat.etag) == (5, first.stat.etag)
        assert store.get_range("k", 0, 100) == b"first"

    def test_of_many_writers_at_once_one_creates(self, store: BlobStore, twin: BlobStore) -> None:
        barrier = threading.Barrier(8)
        created: list[bytes] = []

        def write(number: int) -> None:
            content = bytes([number]) * 1000
            barrier.wait()
            if (twin if number % 2 else store).put_if_absent("race", content):
                created.append(content)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert len(created) == 1
        assert store.get_range("race", 0, 2000) == created[0]

    def test_bytes_like_things_and_nothing_can_be_stored(self, store: BlobStore) -> None:
        assert store.put_if_absent("view", memoryview(b"xabcx")[1:4])
        assert store.put_if_absent("array", bytearray(b"abc"))
        assert store.put_if_absent("empty", b"")
        store.upload("nothing", [])
        store.upload("views", [memoryview(b"xabx")[1:3], b"", bytearray(b"c")])

        assert (
            store.get_range("view", 0, 9) == store.get_range("array", 0, 9) == store.get_range("views", 0, 9) == b"abc"
        )
        for key in ("empty", "nothing"):
            stat = store.stat(key)
            assert stat is not None
            assert stat.size == 0
            assert store.get_range(key, 0, 10) == b""

    @pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 3 * PART, 3 * PART + 17])
    def test_an_upload_of_any_size_arrives_whole(self, store: BlobStore, size: int) -> None:
        content = pattern(size)

        stat = store.upload("big/object.seg", pieces(content, MIB + 3))

        assert stat.size == size
        found = store.stat("big/object.seg")
        assert found is not None
        assert (found.size, found.etag) == (size, stat.etag)
        assert b"".join(store.read("big/object.seg", 0, size)) == content

    def test_an_upload_can_be_repeated(self, store: BlobStore, twin: BlobStore) -> None:
        content = pattern(PART + 5)
        store.upload("k.seg", pieces(content, MIB))

        stat = twin.upload("k.seg", pieces(content, MIB))

        assert store.get_range("k.seg", PART, PART + 5, etag=stat.etag) == content[-5:]
        assert len(list(store.list())) == 1

    @pytest.mark.parametrize("size", [10, 2 * PART + 10])
    def test_an_upload_whose_source_fails_leaves_nothing_and_says_why(self, store: BlobStore, size: int) -> None:
        def failing() -> Iterator[bytes]:
            yield from pieces(pattern(size), MIB)
            raise OSError(5, "the source failed")

        with pytest.raises(OSError, match="the source failed"):
            store.upload("k.seg", failing())

        assert store.stat("k.seg") is None
        assert list(store.list()) == []

    def test_a_range_ends_with_the_object(self, store: BlobStore) -> None:
        store.put_if_absent("k", b"0123456789")

        assert store.get_range("k", 2, 5) == b"234"
        assert type(store.get_range("k", 2, 5)) is bytes
        assert store.get_range("k", 8, 100) == b"89"
        assert store.get_range("k", 10, 20) == b""
        assert store.get_range("k", 1000, 2000) == b""
        assert store.get_range("k", 3, 3) == b""
        assert store.get_ranges("k", [(8, 20), (0, 1), (4, 4), (20, 30)]) == [b"89", b"0", b"", b""]

    def test_what_is_not_there_is_missing_and_said_so(self, store: BlobStore) -> None:
        store.put_if_absent("a/b", b"1")

        for key in ("none", "a", "a/b/c", "a/bb"):
            assert store.stat(key) is None, key
            with pytest.raises(BlobMissing, match=key):
                store.get_range(key, 0, 1)
            with pytest.raises(BlobMissing):
                store.get_ranges(key, [(0, 1), (1, 2)])
            with pytest.raises(BlobMissing):
                list(store.read(key, 0, 10))

    def test_a_changed_object_is_noticed_by_its_etag(self, store: BlobStore, twin: BlobStore) -> None:
        old = store.upload("k", [b"old content"])
        assert old.etag is not None
        assert store.get_range("k", 0, 3, etag=old.etag) == b"old"

        new = twin.upload("k", [b"new content"])

        assert new.etag != old.etag
        assert store.get_range("k", 0, 3, etag=new.etag) == b"new"
        with pytest.raises(BlobChanged, match="k is not the object it was"):
            store.get_range("k", 0, 3, etag=old.etag)
        with pytest.raises(BlobChanged):
            store.get_ranges("k", [(0, 1), (1, 2)], etag=old.etag)
        with pytest.raises(BlobChanged):
            list(store.read("k", 0, 9, etag=old.etag))

    @pytest.mark.parametrize(("chunk", "ahead"), [(1, 0), (7, 3), (1000, 1), (4096, 100)])
    def test_reading_ahead_gives_the_same_bytes_in_order(self, store: BlobStore, chunk: int, ahead: int) -> None:
        content = pattern(300)
        etag = store.put_if_absent("k", content).stat.etag

        assert b"".join(store.read("k", 0, 300, chunk_bytes=chunk, ahead=ahead, etag=etag)) == content
        assert b"".join(store.read("k", 13, 250, chunk_bytes=chunk, ahead=ahead)) == content[13:250]
        assert b"".join(store.read("k", 290, 9_000, chunk_bytes=chunk, ahead=ahead)) == content[290:]
        assert list(store.read("k", 5, 5)) == []
        chunks = list(store.read("k", 0, 300, chunk_bytes=chunk, ahead=ahead))
        assert all(len(data) == min(chunk, 300) for data in chunks[:-1])

    def test_a_read_may_be_left_in_the_middle(self, store: BlobStore) -> None:
        store.put_if_absent("k", pattern(1000))

        for _ in range(3):
            reader = store.read("k", 0, 1000, chunk_bytes=10)
            assert next(reader) == pattern(10)
            del reader

        assert store.get_range("k", 0, 10) == pattern(10)

    def test_a_folder_is_listed_and_nothing_beside_it(self, store: BlobStore) -> None:
        for key in ("a/1", "a/b/2", "a/b/c/3", "ab/4", "a-b/5", "top"):
            store.put_if_absent(key, key.encode())

        assert _keys(store, "a") == _keys(store, "a/") == ["a/1", "a/b/2", "a/b/c/3"]
        assert _keys(store, "a/b") == ["a/b/2", "a/b/c/3"]
        assert _keys(store, "a/b/2") == _keys(store, "none") == _keys(store, "a/b/c/3/4") == []
        assert _keys(store, "") == ["a-b/5", "a/1", "a/b/2", "a/b/c/3", "ab/4", "top"]
        assert all(stat == store.stat(stat.key) for stat in store.list("a"))

    def test_a_deleted_object_is_gone_and_its_key_free(self, store: BlobStore, twin: BlobStore) -> None:
        store.put_if_absent("a/k", b"1")
        store.upload("a/big", pieces(pattern(PART + 1), MIB))

        twin.delete("a/k")
        twin.delete("a/big")
        twin.delete("a/k")
        twin.delete("never/there")

        assert list(store.list()) == []
        assert store.stat("a/k") is None
        assert store.put_if_absent("a/k", b"2")

    def test_deleting_a_folder_deletes_nothing(self, store: BlobStore) -> None:
        store.put_if_absent("a/k", b"1")

        store.delete("a")

        assert store.stat("a/k") is not None

    @pytest.mark.parametrize(
        "key",
        ["", "/a", "a/", "a//b", "..", "a/../b", ".", "a/.", ".hidden", "a/.b", "a b", "a\\b", "ä", "a\n", "x" * 201,
         "/".join(["part" * 10] * 40), "a?b", "a%2fb", "a#b", "a\0b"],
    )  # fmt: skip
    def test_a_key_that_is_none_is_refused_everywhere(self, store: BlobStore, key: str) -> None:
        with pytest.raises(Invalid):
            store.put_if_absent(key, b"1")
        with pytest.raises(Invalid):
            store.upload(key, [b"1"])
        with pytest.raises(Invalid):
            store.get_range(key, 0, 1)
        with pytest.raises(Invalid):
            store.stat(key)
        with pytest.raises(Invalid):
            store.delete(key)
        if key not in ("", "a/"):
            with pytest.raises(Invalid):
                list(store.list(key))

    def test_ranges_that_are_none_are_refused(self, store: BlobStore) -> None:
        store.put_if_absent("k", b"123")

        for start, stop in ((-1, 1), (2, 1)):
            with pytest.raises(Invalid):
                store.get_range("k", start, stop)
            with pytest.raises(Invalid):
                list(store.read("k", start, stop))
        with pytest.raises(Invalid):
            list(store.read("k", 0, 3, chunk_bytes=0))

    def test_a_probe_passes_and_leaves_nothing(self, store: BlobStore) -> None:
        found = store.probe()

        assert found.exclusive_create
        assert found.store == store.name
        assert list(store.list()) == []

    def test_fresh_uploads_are_not_stale(self, store: BlobStore) -> None:
        store.upload("k.seg", pieces(pattern(PART + 1), MIB))

        assert store.abort_stale_uploads(3600) == 0
        assert store.stat("k.seg") is not None

    def test_a_closed_store_says_so_and_closes_twice(self, store: BlobStore) -> None:
        store.put_if_absent("k", b"1")
        store.close()
        store.close()

        for call in (
            lambda: store.put_if_absent("k", b"1"),
            lambda: store.upload("k", [b"1"]),
            lambda: store.get_range("k", 0, 1),
            lambda: store.stat("k"),
            lambda: list(store.list()),
            lambda: store.delete("k"),
            store.probe,
        ):
            with pytest.raises(Closed):
                call()


def _keys(store: BlobStore, prefix: str) -> list[str]:
    return sorted(stat.key for stat in store.list(prefix))


def _modified(store: BlobStore, key: str) -> int:
    stat = store.stat(key)
    assert stat is not None
    return stat.modified_ms
