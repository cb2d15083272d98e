"""A shard of a deleted topic is not brought to life again by whichever caller still knows its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay import UnknownTopic
from forebay.settings import MetadataSettings, Settings, StorageSettings, StoreSettings
from forebay.storage import Storage
from forebay.testing.inside import inside
from forebay.topics import TopicSpec


def _settings(tmp_path: Path) -> Settings:
    return Settings(
        metadata=MetadataSettings(path=f"{tmp_path}/shared.sqlite"),
        storage=StorageSettings(mode="shared_fs"),
        store=StoreSettings(root=f"{tmp_path}/store"),
    )


@pytest.mark.plain_locks
def test_a_topic_deleted_between_look_and_use_stays_deleted_and_its_name_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by review: a state of the old topic came to stand where the new one's belongs, and kept that closed."""
    settings = _settings(tmp_path)
    with Storage.open(tmp_path / "A", settings) as a, Storage.open(tmp_path / "B", settings) as b:
        old = a.create_topic("orders")

        def looked(spec: TopicSpec) -> TopicSpec:
            b.delete_topic(str(spec.name))
            return spec

        monkeypatch.setattr(inside(a).definitions, "current", looked)

        with pytest.raises(UnknownTopic, match="was deleted"):
            old.append(b"0")

        monkeypatch.undo()
        assert b.create_topic("orders").append(b"new") == 0
        assert list((tmp_path / "store").rglob("*.seg")) == []
