"""Compaction from the store alone, with real servers for history and metadata, while the topic changes hands."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.compacting.planning import Rules
from forebay.format.metadata.descriptor import DescriptorKind
from forebay.format.metadata.keys import compactor_key
from tests.compacting.directly import check_sound, compacted, kinds_of, shown
from tests.history.test_servers_killed import Bucket
from tests.ledger import Ledger
from tests.moves.conftest import WITH_SERVERS
from tests.spark.mixed import ENVIRONMENT, Mixed
from tests.support.environments import directories
from tests.support.environments.directories import TOPIC
from tests.support.etcd import Cluster

pytestmark = list(WITH_SERVERS)


@pytest.mark.slow
def test_topic_is_compacted_while_it_moves(
    tmp_path: Path, bucket: Bucket, etcd: Cluster, folder: str, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    environment = directories.in_etcd(
        directories.object_store(tmp_path, bucket.endpoint, folder), etcd.endpoints, f"/{folder}"
    )
    mixed = Mixed(environment, partitions=1)
    mixed.every_tier()
    mixed.export()
    rows = mixed.rows

    def move() -> None:
        """Between what is written and the swap."""
        mixed.log.seal_topic(TOPIC)

    rules = Rules(settle_ms=0, segments_min=2)
    report = compacted(environment, rules=rules, name=None, meanwhile=move)

    assert report.is_clean and report.figures["rewrites"] == 1, report.lines()
    with environment.open("two") as other:
        topic = other.topic(TOPIC)
        assert kinds_of(other, topic) == [DescriptorKind.PARQUET]
        assert shown(topic) == rows
        topic.append(b"more")
        assert directories.metadata_of(other).get(compactor_key("shop", "orders", 0, prefix=f"/{folder}")) is None
        assert compacted(environment, rules=rules, name=None).summary == "nothing to do"
    check_sound(environment, "two")
    mixed.close()
    ledger.count("compactions during a move", servers="S3, etcd")
