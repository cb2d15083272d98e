"""The settings tree: frozen, checked when it is made, read from YAML, a mapping and the environment.

A settings value that exists is valid: every constructor checks types and ranges, so nobody checks again.
The declarations below are the only home of a setting; `docs/settings.md` is generated from them.
Later sources win: defaults, then the file, then the environment, then overrides of the caller.
Knows nothing of topics, disks or stores. Reads one file, its own, and never the process environment,
which comes in as an argument.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Meta

from forebay.errors import Invalid

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB

ENVIRONMENT_PREFIX = "FOREBAY_"
ENVIRONMENT_SEPARATOR = "__"
FILE_BYTES_MAX = MIB

_REFERENCE = re.compile(r"\$\$\{|\$\{([^}]*)\}?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNITS = {"ms": "milliseconds", "s": "seconds", "seconds": "seconds", "bytes": "bytes"}
_COUNTS = ("records", "producers", "appends", "descriptors", "shards")


def _within(low: int, high: int, meaning: str) -> Meta:
    return Meta(ge=low, le=high, description=meaning)


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One group of settings. Being made at all means that every field is in range."""

    group: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for setting in settings_of(type(self)):
            setting.parse(getattr(self, setting.name), source="settings", strict=True)


class WalSettings(_Group, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The write-ahead log of one shard."""

    group: ClassVar[str] = "wal"

    flush_interval_ms: Annotated[
        int, _within(1, 60_000, "How long a record of class `memory` may wait in the queue before it is written.")
    ] = 20
    sync_interval_ms: Annotated[
        int,
        _within(1, 600_000, "How often written records are synced in the background: what a power loss may take."),
    ] = 1_000
    mark_interval_ms: Annotated[
        int, _within(1, 600_000, "How soon an idle shard writes down how far its log is durable.")
    ] = 1_000
    batch_bytes_max: Annotated[
        int,
        _within(4 * KIB, 8 * MIB, "How much of what waits one group commit puts into one frame; appends stay whole."),
    ] = MIB
    frame_bytes_max: Annotated[
        int, _within(64 * KIB, 64 * MIB, "The largest frame, and so the largest append that is atomic.")
    ] = 8 * MIB
    rotate_bytes_max: Annotated[
        int, _within(4 * KIB, 4 * GIB, "A log file of this size is sealed and a new one begun.")
    ] = 64 * MIB
    rotate_seconds_max: Annotated[int, _within(1, 7 * 86_400, "A log file with records is sealed at this age.")] = 300
    cache_bytes_max: Annotated[
        int, _within(0, GIB, "Newest records of each shard kept in memory for readers at the tail.")
    ] = 4 * MIB
    queue_records_max: Annotated[
        int, _within(1, 10_000_000, "Records that may wait to be written; beyond it appends wait.")
    ] = 100_000
    queue_bytes_max: Annotated[
        int, _within(4 * KIB, 16 * GIB, "Bytes that may wait to be written; beyond it appends wait.")
    ] = 64 * MIB
    append_timeout_ms: Annotated[
        int, _within(0, 3_600_000, "How long an append waits for room in a full queue before it is refused.")
    ] = 30_000
    reserve_records_min: Annotated[
        int,
        _within(1, 2**32, "Smallest step in which offsets are reserved ahead: the gap an unclean stop may leave."),
    ] = 65_536
    free_bytes_min: Annotated[
        int, _within(0, TIB, "Appends are refused while the file system has less free space than this.")
    ] = 64 * MIB
    reframe_bytes_min: Annotated[
        int, _within(0, 64 * MIB, "A file whose mean frame is smaller is rewritten in large frames when sealed.")
    ] = 32 * KIB
    reframe_bytes_max: Annotated[
        int, _within(4 * KIB, 64 * MIB, "Frames made by that rewriting; never above `wal.frame_bytes_max`.")
    ] = MIB
    producers_max: Annotated[int, _within(1, 1_000_000, "Idempotent producers each shard remembers.")] = 10_000
    producer_appends_max: Annotated[
        int, _within(1, 100_000, "Newest appends of each idempotent producer whose repetition is recognised.")
    ] = 1_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reframe_bytes_min > self.reframe_bytes_max:
            raise Invalid(
                f"wal.reframe_bytes_min is {self.reframe_bytes_min}, above wal.reframe_bytes_max "
                f"{self.reframe_bytes_max}: rewriting would never end; lower the first or raise the second"
            )


class MemorySettings(_Group, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The memory engine (class `ephemeral`)."""

    group: ClassVar[str] = "memory"

    bytes_max: Annotated[
        int, _within(4 * KIB, TIB, "Records each shard keeps in memory; beyond it the oldest are evicted.")
    ] = 256 * MIB


class MetadataSettings(_Group, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The metadata store: topics, shard states, the catalog, cursors."""

    group: ClassVar[str] = "metadata"

    backend: Annotated[
        Literal["sqlite", "memory"],
        Meta(description="`sqlite` keeps it in one file; `memory` forgets it at the end of the process."),
    ] = "sqlite"
    path: Annotated[
        str | None, Meta(description="The SQLite file. Left out, it lies in the directory of the log files.")
    ] = None
    prefix: Annotated[
        str,
        Meta(
            pattern=r"^(/[A-Za-z0-9._-]{1,100}){1,8}\Z",
            description="What every key begins with, so that several installations can share one store.",
        ),
    ] = "/forebay"
    busy_timeout_ms: Annotated[
        int, _within(0, 600_000, "How long to wait for another process that is writing to the SQLite file.")
    ] = 5_000


class RuntimeSettings(_Group, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all shards of one process share."""

    group: ClassVar[str] = "runtime"

    descriptors_max: Annotated[
        int, _within(8, 1_000_000, "File descriptors kept open for log files; others are opened again when used.")
    ] = 128
    maintenance_interval_ms: Annotated[
        int, _within(1, 60_000, "How often the maintenance thread looks for work that time asks for.")
    ] = 20
    shards_syncfs_min: Annotated[
        int, _within(1, 1_000_000, "From this many dirty shards on, one sync of the file system replaces one per file.")
    ] = 64


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of one process."""

    wal: WalSettings = msgspec.field(default_factory=WalSettings)
    memory: MemorySettings = msgspec.field(default_factory=MemorySettings)
    metadata: MetadataSettings = msgspec.field(default_factory=MetadataSettings)
    runtime: RuntimeSettings = msgspec.field(default_factory=RuntimeSettings)

    @classmethod
    def load(
        cls,
        path: str | None = None,
        overrides: Mapping[str, object] | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> Settings:
        """The settings of `path` (YAML), changed by `FOREBAY_…` variables of `environment`, then by `overrides`.

        `${VAR}` in a string of the file or of `overrides` stands for that variable of `environment`
        (`$${` for a plain `${`). Raises `Invalid` that names the source, the setting and the way out.
        """
        sources: list[tuple[str, Mapping[object, object]]] = []
        if path is not None:
            sources.append((path, _expand(_read_yaml(path), path, environment)))
        sources.append(("the environment", _environment_tree(environment)))
        if overrides is not None:
            sources.append(("overrides", _expand(dict(overrides), "overrides", environment)))
        values: dict[str, dict[str, object]] = {group: {} for group in GROUPS}
        for source, tree in sources:
            for setting, value in _parse_tree(tree, source):
                values[setting.group][setting.name] = value
        made: dict[str, Any] = {group: kind(**values[group]) for group, kind in GROUPS.items()}
        return cls(**made)


GROUPS: Mapping[str, type[_Group]] = MappingProxyType(
    {kind.group: kind for kind in (WalSettings, MemorySettings, MetadataSettings, RuntimeSettings)}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting as declared: what the loader checks by and the documentation is made from."""

    group: str
    name: str
    type: Any
    default: object
    meta: Meta

    @property
    def path(self) -> str:
        return f"{self.group}.{self.name}"

    @property
    def environment_name(self) -> str:
        return f"{ENVIRONMENT_PREFIX}{self.group}{ENVIRONMENT_SEPARATOR}{self.name}".upper()

    @property
    def meaning(self) -> str:
        return self.meta.description or ""

    @property
    def unit(self) -> str:
        """The unit, read off the name, which carries it by rule; empty for texts."""
        words = self.name.split("_")
        return next((_UNITS.get(word, word) for word in reversed(words) if word in _UNITS or word in _COUNTS), "")

    @property
    def range(self) -> str:
        """The allowed values, in words."""
        if self.meta.ge is not None:
            return f"{self.meta.ge} to {self.meta.le}"
        choices = get_args(self.type) if get_origin(self.type) is Literal else ()
        if choices:
            return " or ".join(str(choice) for choice in choices)
        if self.meta.pattern is not None:
            return "one to eight parts, each `/` and letters, digits, `.`, `_`, `-`"
        return "text, or left out"

    def parse(self, value: object, *, source: str, strict: bool) -> object:
        """The value as its declared type; texts are read as numbers unless `strict`."""
        try:
            return msgspec.convert(value, Annotated[self.type, self.meta], strict=strict)
        except msgspec.ValidationError as error:
            allowed = f"{self.range} {self.unit}".rstrip()
            raise Invalid(f"{source}: {self.path} is {_shown(value)}; allowed: {allowed}") from error


@functools.cache
def settings_of(kind: type[_Group]) -> tuple[Setting, ...]:
    """The settings of one group, in the order of their declaration."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for field in msgspec.structs.fields(kind):
        declared, meta = get_args(hints[field.name])
        found.append(Setting(group=kind.group, name=field.name, type=declared, default=field.default, meta=meta))
    return tuple(found)


def all_settings() -> tuple[Setting, ...]:
    """Every setting there is, group by group."""
    return tuple(setting for kind in GROUPS.values() for setting in settings_of(kind))


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key given twice is an error and not a silent overwrite."""

    # The signature is PyYAML's.
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", key_node.start_mark)
            if key is not None:
                seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(path: str) -> object:
    try:
        with open(path, "rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise Invalid(f"cannot read settings file {path}: {error.strerror or error}") from error
    if len(content) > FILE_BYTES_MAX:
        raise Invalid(f"settings file {path} is larger than {FILE_BYTES_MAX} bytes: is it the right file?")
    try:
        return yaml.load(content, _UniqueKeys)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise Invalid(f"settings file {path} is not YAML: {error}") from error


def _expand(tree: object, source: str, environment: Mapping[str, str]) -> Mapping[object, object]:
    """The tree with `${VAR}` replaced in its strings; groups are one level deep, so no recursion is needed."""
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise Invalid(f"{source} holds {_shown(tree)}, not groups of settings such as `wal:`")

    def expanded(value: object) -> object:
        return _expand_text(value, source, environment) if isinstance(value, str) else value

    return {
        group: {name: expanded(value) for name, value in inner.items()} if isinstance(inner, Mapping) else inner
        for group, inner in tree.items()
    }


def _expand_text(text: str, source: str, environment: Mapping[str, str]) -> str:
    def value_of(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return "${"
        if not match.group(0).endswith("}") or not _VARIABLE.fullmatch(name):
            raise Invalid(f"{source}: {match.group(0)!r} names no variable; write ${{NAME}}, or $${{ for a plain ${{")
        if name not in environment:
            raise Invalid(f"{source} refers to the environment variable {name}, which is not set")
        return environment[name]

    return _REFERENCE.sub(value_of, text)


def _environment_tree(environment: Mapping[str, str]) -> Mapping[object, object]:
    """`FOREBAY_WAL__SYNC_INTERVAL_MS=500` as `{"wal": {"sync_interval_ms": "500"}}`.

    Only names with the double underscore count: container platforms set names such as
    `FOREBAY_SERVICE_HOST` by themselves.
    """
    tree: dict[object, dict[object, object]] = {}
    for variable in sorted(environment):
        path = variable.removeprefix(ENVIRONMENT_PREFIX)
        group, separator, name = path.lower().partition(ENVIRONMENT_SEPARATOR)
        if path != variable and separator:
            tree.setdefault(group, {})[name] = environment[variable]
    return tree


def _parse_tree(tree: Mapping[object, object], source: str) -> Iterator[tuple[Setting, object]]:
    known = {setting.path: setting for setting in all_settings()}
    for group, inner in tree.items():
        if group not in GROUPS:
            raise _unknown(str(group), source)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            raise Invalid(f"{source}: {group} is {_shown(inner)}, not a group such as {_example(str(group))}")
        for name, value in inner.items():
            path = f"{group}.{name}"
            if path not in known:
                raise _unknown(path, source)
            yield known[path], known[path].parse(value, source=source, strict=False)


def _unknown(path: str, source: str) -> Invalid:
    settings = all_settings()
    names = {setting.name: setting.path for setting in settings}
    names |= {setting.path: setting.path for setting in settings} | {group: group for group in GROUPS}
    near = difflib.get_close_matches(path, names, n=1, cutoff=0.5)
    hint = f"did you mean {names[near[0]]}?" if near else f"the groups are {', '.join(GROUPS)}"
    return Invalid(f"{source}: {path} is not a setting; {hint}")


def _example(group: str) -> str:
    return settings_of(GROUPS[group])[0].path


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
