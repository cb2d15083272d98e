"""A deleted topic leaves no object in the store, whatever it had there and in however many partitions."""

from __future__ import annotations

from pathlib import Path

from forebay.settings import Settings
from forebay.storage import Storage


def test_objects_of_every_partition_go_and_those_of_other_topics_stay(tmp_path: Path) -> None:
    store = tmp_path / "store"
    settings = Settings.load(overrides={"storage": {"mode": "shared_fs"}, "store": {"root": str(store)}})
    with Storage.open(tmp_path / "log", settings) as log:
        for name in ("orders", "orders2"):
            topic = log.create_topic(name, partitions=3)
            for partition in range(3):
                topic.append(b"x", partition=partition)
            log.export_topic(name)
        kept = topic.spec.topic_id
        assert len(list(store.rglob("*.seg"))) == 6

        log.delete_topic("orders")

        assert {path.parent.name for path in store.rglob("*.seg")} == {f"{kept}_{partition}" for partition in range(3)}
        assert [path for path in store.rglob("*.idx") if kept not in path.parent.name] == []
