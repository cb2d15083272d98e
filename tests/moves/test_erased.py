"""Erasing a key whose history lies in a bucket."""

from __future__ import annotations

from pathlib import Path

from forebay.blobs import BlobStore
from forebay.testing.inside import inside
from tests.history.test_servers_killed import Bucket
from tests.moves.conftest import WITH_SERVERS
from tests.storage.test_erasing import KEY, SECRET, TOPIC, filled, live, others
from tests.support.environments import directories
from tests.support.erased import holders, holds

pytestmark = list(WITH_SERVERS)


def test_a_rewriting_clears_a_bucket(tmp_path: Path, bucket: Bucket) -> None:
    environment = directories.object_store(tmp_path, bucket.endpoint, "erased")
    with environment.open("one") as log:
        topic = filled(log)
        before = live(topic)
        first = log.erase_key(TOPIC, KEY)
        store = inside(log).places.stores[-1]
        named = _holding(store, SECRET)

        rewritten = log.erase_key(TOPIC, KEY, now=True)

        in_bucket = {remnant.place.rpartition(":")[2] for remnant in first.remains if not remnant.place.startswith("/")}
        assert in_bucket == named != set()
        assert rewritten.remains == () and live(topic) == others(before)
        assert _holding(store, SECRET) | _holding(store, KEY) == set()
        assert holders(SECRET, tmp_path) == set()


def _holding(store: BlobStore, needle: bytes) -> set[str]:
    """The objects that hold these bytes, in whichever form."""
    return {stat.key for stat in store.list() if holds(store.get_range(stat.key, 0, stat.size), needle)}
