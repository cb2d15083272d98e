"""One setting: its declaration, what it allows, and how a value becomes its type.

Knows no setting by name and no source of values.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from forebay.decoders import converted
from forebay.errors import Invalid, Unsupported

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB

ENVIRONMENT_PREFIX = "FOREBAY_"
ENVIRONMENT_SEPARATOR = "__"
SECRET = {"secret": True}
"""Marks a setting whose value is shown nowhere."""
HIDDEN = "(hidden)"

_UNITS = {
    "ms": "milliseconds",
    "s": "seconds",
    "seconds": "seconds",
    "bytes": "bytes",
    "percent": "percent",
    "openers": "threads",
    "committers": "threads",
    "port": "port number",
}
_COUNTS = (
    "records", "producers", "appends", "descriptors", "shards", "parts", "retries", "snapshots",
    "connections", "consumers", "headers", "reads", "requests", "streams", "topics",
)  # fmt: skip


def within(low: int, high: int, meaning: str) -> Meta:
    return Meta(ge=low, le=high, description=meaning)


class SettingsGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One group of settings. Being made at all means that every field is in range."""

    group: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for setting in settings_of(type(self)):
            setting.parse(getattr(self, setting.name), source="settings", strict=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # It stays in this process, so secrets go with it.
        fields = {setting.name: getattr(self, setting.name) for setting in settings_of(type(self))}
        return type(self)(**copy.deepcopy(fields, memo))

    def __reduce__(self) -> str | tuple[Any, ...]:
        for setting in settings_of(type(self)):
            if setting.secret and getattr(self, setting.name):
                raise Unsupported(
                    f"{setting.path} may hold secrets and is not pickled: load the settings in the other process, "
                    "from a file that names variables of its environment as ${NAME}"
                )
        return super().__reduce__()

    def __repr__(self) -> str:
        shown_fields = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({shown_fields})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        values = [(setting, getattr(self, setting.name)) for setting in settings_of(type(self))]
        return [(setting.name, HIDDEN if setting.secret and value is not None else value) for setting, value in values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting as declared: what the loader checks by and the documentation is made from."""

    group: str
    name: str
    type: Any
    default: object
    meta: Meta
    declared: Any
    """The type together with the bounds: what a value is checked by."""

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
    def secret(self) -> bool:
        return self.meta.extra == SECRET

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
        many = {tuple: "texts, in a variable parted by commas", dict: "names with values, in a variable as `a=1, b=2`"}
        return many.get(get_origin(self.type), "text, or left out")

    def parse(self, value: object, *, source: str, strict: bool) -> object:
        """The value as its declared type; texts are read as numbers and lists unless `strict`."""
        if isinstance(value, str) and not strict:
            value = _parted(value, get_origin(self.type))
        try:
            return converted(value, self.declared, strict=strict)
        except msgspec.ValidationError as error:
            allowed = f"{self.range} {self.unit}".rstrip()
            given = HIDDEN if self.secret else shown(value)
            raise Invalid(f"{source}: {self.path} is {given}; allowed: {allowed}") from error


@functools.cache
def settings_of(kind: type[SettingsGroup]) -> tuple[Setting, ...]:
    """The settings of one group, in the order of their declaration."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for field in msgspec.structs.fields(kind):
        declared = hints[field.name]
        plain, meta = get_args(declared)
        default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
        found.append(
            Setting(group=kind.group, name=field.name, type=plain, default=default, meta=meta, declared=declared)
        )
    return tuple(found)


def _parted(text: str, kind: object) -> object:
    """A text as the list or mapping it stands for, where the setting is one."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if kind is tuple:
        return parts
    # A part without "=" stays as it is, so that it is refused and not half understood.
    return dict(part.split("=", 1) for part in parts) if kind is dict and all("=" in part for part in parts) else text


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
