"""Where values come from: YAML, the environment, a mapping; read, expanded and parsed, or refused by name.

Reads one file, its own; the environment comes in as an argument.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from forebay.errors import Invalid
from forebay.settings.groups import GROUPS, all_settings
from forebay.settings.setting import ENVIRONMENT_PREFIX, ENVIRONMENT_SEPARATOR, MIB, Setting, settings_of, shown

FILE_BYTES_MAX = MIB

_REFERENCE = re.compile(r"\$\$\{|\$\{([^}]*)\}?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def read_yaml(path: str) -> object:
    return parse_yaml(read_file(path), f"settings file {path}")


def read_file(path: str) -> bytes:
    """The content of a settings file; `Invalid` if it cannot be one."""
    try:
        with open(path, "rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise Invalid(f"cannot read settings file {path}: {error.strerror or error}") from error
    if len(content) > FILE_BYTES_MAX:
        raise Invalid(f"settings file {path} is larger than {FILE_BYTES_MAX} bytes: is it the right file?")
    return content


def parse_yaml(content: str | bytes, source: str) -> object:
    from forebay.settings.documents import parse_document  # noqa: PLC0415 - YAML takes its time to load

    return parse_document(content, source)


def variables_in(text: str) -> set[str]:
    """The environment variables that a text refers to."""
    return {match.group(1) for match in _REFERENCE.finditer(text) if match.group(1) is not None}


def expand(tree: object, source: str, environment: Mapping[str, str]) -> Mapping[object, object]:
    """The tree with `${VAR}` replaced in its strings; groups are one level deep and hold lists or flat mappings."""
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise Invalid(f"{source} holds {shown(tree)}, not groups of settings such as `wal:`")

    def expanded(value: object) -> object:
        if isinstance(value, list | tuple):
            return [expanded(part) for part in value]
        if isinstance(value, Mapping):
            return {name: part if isinstance(part, Mapping) else expanded(part) for name, part in value.items()}
        return expand_text(value, source, environment) if isinstance(value, str) else value

    return {
        group: {name: expanded(value) for name, value in inner.items()} if isinstance(inner, Mapping) else inner
        for group, inner in tree.items()
    }


def expand_text(text: str, source: str, environment: Mapping[str, str]) -> str:
    """The text with `${VAR}` replaced; `Invalid` names a variable that is not set, and shows no value."""

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


def environment_tree(environment: Mapping[str, str]) -> Mapping[object, object]:
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


def parse_tree(tree: Mapping[object, object], source: str) -> Iterator[tuple[Setting, object]]:
    known = {setting.path: setting for setting in all_settings()}
    for group, inner in tree.items():
        if group not in GROUPS:
            raise _unknown(str(group), source)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            raise Invalid(f"{source}: {group} is {shown(inner)}, not a group such as {_example(str(group))}")
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
