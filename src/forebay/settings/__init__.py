"""The settings tree: frozen, checked when it is made, read from YAML, a mapping and the environment.

A settings value that exists is valid: every constructor checks types and ranges, so no caller checks again.
The declarations in `groups` are the only home of a setting; `docs/settings.md` is generated from them.
Later sources win: defaults, then the file, then the environment, then overrides of the caller.
Knows nothing of topics, disks or stores.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import msgspec

from forebay.errors import Invalid
from forebay.settings.groups import (
    GROUPS,
    ExportSettings,
    MemorySettings,
    MetadataSettings,
    MetricsSettings,
    ProgressSettings,
    RetentionSettings,
    RuntimeSettings,
    ServerSettings,
    StorageSettings,
    StoreSettings,
    TableSettings,
    WalSettings,
    all_settings,
)
from forebay.settings.setting import GIB, KIB, MIB, TIB, Setting, settings_of
from forebay.settings.sources import FILE_BYTES_MAX, environment_tree, expand, parse_tree, read_yaml

__all__ = [
    "FILE_BYTES_MAX",
    "GIB",
    "GROUPS",
    "KIB",
    "MIB",
    "TIB",
    "ExportSettings",
    "MemorySettings",
    "MetadataSettings",
    "MetricsSettings",
    "ProgressSettings",
    "RetentionSettings",
    "RuntimeSettings",
    "ServerSettings",
    "Setting",
    "Settings",
    "StorageSettings",
    "StoreSettings",
    "TableSettings",
    "WalSettings",
    "all_settings",
    "settings_of",
]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of one process."""

    storage: StorageSettings = msgspec.field(default_factory=StorageSettings)
    wal: WalSettings = msgspec.field(default_factory=WalSettings)
    memory: MemorySettings = msgspec.field(default_factory=MemorySettings)
    metadata: MetadataSettings = msgspec.field(default_factory=MetadataSettings)
    store: StoreSettings = msgspec.field(default_factory=StoreSettings)
    export: ExportSettings = msgspec.field(default_factory=ExportSettings)
    retention: RetentionSettings = msgspec.field(default_factory=RetentionSettings)
    progress: ProgressSettings = msgspec.field(default_factory=ProgressSettings)
    table: TableSettings = msgspec.field(default_factory=TableSettings)
    runtime: RuntimeSettings = msgspec.field(default_factory=RuntimeSettings)
    metrics: MetricsSettings = msgspec.field(default_factory=MetricsSettings)
    server: ServerSettings = msgspec.field(default_factory=ServerSettings)

    def __post_init__(self) -> None:
        mode, store = self.storage.mode, self.store
        if mode == "local":
            usual = RetentionSettings()
            local_copies = msgspec.structs.replace(
                self.retention,
                evict_interval_s=usual.evict_interval_s,
                evict_share_percent=usual.evict_share_percent,
            )
            for group, given in (("store", store), ("export", self.export), ("retention", local_copies)):
                if given != type(given)():
                    raise Invalid(
                        f'storage.mode is "local", which has no {group}: leave the group {group} out, or set '
                        'storage.mode to "shared_fs" or "object_store"'
                    )
        elif (mode == "shared_fs") != (store.backend == "directory"):
            fitting = '"directory"' if mode == "shared_fs" else '"s3", "gcs" or "azure"'
            other = "object_store" if mode == "shared_fs" else "shared_fs"
            place = f", in {store.root}" if store.root else ""
            raise Invalid(
                f'storage.mode is "{mode}" and store.backend "{store.backend}"{place}: use {fitting}, or set '
                f'storage.mode to "{other}"'
            )
        elif mode == "shared_fs" and not (store.root or "").strip():
            raise Invalid('storage.mode is "shared_fs" without store.root: name the directory that all share')

    @property
    def is_shared(self) -> bool:
        """Whether history lies where others can go on with it."""
        return self.storage.mode != "local"

    @classmethod
    def load(
        cls,
        path: str | PurePath | None = None,
        overrides: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Settings:
        """The settings of `path` (YAML), changed by `FOREBAY_…` variables of `environment`, then by `overrides`.

        The environment is that of this process, unless given.
        `${VAR}` in a string of the file or of `overrides` stands for that variable of `environment`
        (`$${` for a plain `${`). Raises `Invalid` that names the source, the setting and the way out.
        """
        environment = os.environ if environment is None else environment
        sources: list[tuple[str, Mapping[object, object]]] = []
        if path is not None:
            file = str(path)
            sources.append((file, expand(read_yaml(file), file, environment)))
        sources.append(("the environment", environment_tree(environment)))
        if overrides is not None:
            sources.append(("overrides", expand(overrides, "overrides", environment)))
        return cls.of(sources)

    @classmethod
    def of(cls, sources: Sequence[tuple[str, Mapping[object, object]]]) -> Settings:
        """The settings of these trees, each with the name of where it comes from; later ones win."""
        values: dict[str, dict[str, object]] = {group: {} for group in GROUPS}
        for source, tree in sources:
            for setting, value in parse_tree(tree, source):
                values[setting.group][setting.name] = value
        made: dict[str, Any] = {group: kind(**values[group]) for group, kind in GROUPS.items()}
        return cls(**made)
