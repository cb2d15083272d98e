"""Where topics are, as Spark's options say it: plain, the same on every machine, and never with a secret inside.

Either the files themselves, or a broker that has them. A `Location` travels to executors. What is secret stays a
reference to an environment variable or a file, which each process looks up for itself. Knows options and settings;
opens nothing but a settings file and the file of a token.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from forebay.blobs.objects.options import CONNECTION, OPEN
from forebay.bulk import SharedStore
from forebay.directory import IN_MEMORY
from forebay.errors import Invalid, Unsupported
from forebay.settings import Setting, Settings, all_settings
from forebay.settings.places import BACKENDS
from forebay.settings.sources import environment_tree, expand, parse_yaml, read_file, variables_in

NAMES: Final = ("path", "settings", "store", "metadata", "broker", "tokenEnv", "tokenFile", "verify")
"""Options that say where topics are; those with a dot are settings and do so too."""
_LOWER_NAMES: Final = frozenset(name.lower() for name in NAMES)
_OF_FILES: Final = ("path", "settings", "store", "metadata")
_OF_BROKER: Final = ("tokenEnv", "tokenFile", "verify")
_BROKER: Final = "http://HOST:PORT or https://HOST:PORT"
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STORE_GROUP: Final = "store."
_ALSO_OWN: Final = (_STORE_GROUP, "table.")
"""Settings that a process has of its own beside a broker: how it reaches the store, and open tables."""

_OPTIONS: Final = "store.options"
_TABLE_OPTIONS: Final = "table.options"
_SECRET_WORDS: Final = ("credential", "key", "password", "sas", "secret", "token")
"""An option of a catalog of tables with one of these in its name is taken for a secret."""
_FILE: Final = "the settings file"
_USER: Final = re.compile(r"://[^/]*@")
_SETTINGS: Final[Mapping[str, Setting]] = MappingProxyType({setting.path: setting for setting in all_settings()})
_STORE: Final = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///directory"
_METADATA: Final = "sqlite:///file, etcd://host:port,host:port or, encrypted, etcds://host:port,host:port"
_ETCD: Final = {"etcd": "http", "etcds": "https"}


def is_about_place(option: str) -> bool:
    """Whether the option of this name, in lower case, is one of a `Location`."""
    return option in _LOWER_NAMES or "." in option


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A data directory, or the store and metadata that its history lies in; or both. Or a broker that has them.

    Without `path` and `broker` there is history alone: what its owner has not exported yet is not visible.
    """

    path: str | None = None
    """The data directory, absolute."""
    settings_text: str | None = None
    """A settings file as written: its references to variables are not replaced."""
    overrides: tuple[tuple[str, str], ...] = ()
    """Settings by name, as text, with references; later ones win, and all win over the file."""
    broker: str | None = None
    """The address of a broker: it says where records lie, and gives those that only it reaches."""
    token_env: str | None = None
    """The environment variable with the token for the broker, in each process that asks it."""
    token_file: str | None = None
    """The file with the token, on each machine that asks it."""
    verify: str | None = None
    """The file (PEM) with the certificate authority of the broker; those of the system without one."""
    store_name: str | None = None
    """What descriptors call the store of `overrides`, where a broker has said it."""

    @classmethod
    def parse(cls, options: Mapping[str, str], environment: Mapping[str, str] | None = None) -> Location:
        """What the options of a read or a write say, those of other meaning left aside.

        `FOREBAY_…` variables of this process count as they do for the command line; those that hold secrets must be
        set on the executors too. Raises `Invalid` that names the option, and for a secret that stands there plainly.
        """
        environment = os.environ if environment is None else environment
        given = {name.lower(): text for name, text in options.items()}
        if "broker" in given:
            return cls._of_broker(given, environment)
        stray = next((name for name in _OF_BROKER if name.lower() in given), None)
        if stray is not None:
            raise Invalid(f'option "{stray}" goes with option "broker": name the broker, or leave it out')
        file = given.get("settings")
        overrides = [*_of_environment(environment), *_of_urls(given)]
        overrides += sorted((name, text) for name, text in given.items() if "." in name)
        found = cls(
            path=_absolute(given["path"]) if given.get("path") else None,
            settings_text=_text(file) if file is not None else None,
            overrides=tuple(overrides),
        )
        found._refuse_secrets()
        settings = found.settings(environment)
        found._check(settings)
        return replace(found, overrides=(*found.overrides, *_absolute_paths(settings)))

    @classmethod
    def of(cls, path: str | Path, settings: str | Path | None = None) -> Location:
        """A data directory, and the file with its settings if it needs one."""
        return cls.parse({"path": str(path)} | ({} if settings is None else {"settings": str(settings)}))

    @classmethod
    def at_broker(
        cls, url: str, *, token_env: str | None = None, token_file: str | None = None, verify: str | None = None
    ) -> Location:
        """A broker, which is asked for everything but the objects of a store that executors reach themselves."""
        given = {"broker": url, "tokenEnv": token_env, "tokenFile": token_file, "verify": verify}
        return cls.parse({name: text for name, text in given.items() if text is not None})

    @classmethod
    def _of_broker(cls, given: Mapping[str, str], environment: Mapping[str, str]) -> Location:
        stray = next((name for name in _OF_FILES if name in given), None)
        stray = stray or next((name for name in given if "." in name and not name.startswith(_ALSO_OWN)), None)
        if stray is not None:
            raise Invalid(
                f'option "{stray}" and option "broker" contradict each other: the broker says where its topics lie; '
                f'leave "{stray}" out, or leave "broker" out to read the files themselves'
            )
        if "tokenenv" in given and "tokenfile" in given:
            raise Invalid("options tokenEnv and tokenFile contradict each other: give one of them")
        name = given.get("tokenenv")
        if name is not None and not _VARIABLE.fullmatch(name):
            # Not repeated: it may be the token itself.
            raise Invalid('option "tokenEnv" is no name of an environment variable: give its name, not the token')
        own = [(name, text) for name, text in given.items() if "." in name]
        found = cls(
            broker=_broker_url(given["broker"]),
            token_env=name,
            token_file=_absolute(given["tokenfile"]) if "tokenfile" in given else None,
            verify=_absolute(given["verify"]) if "verify" in given else None,
            overrides=(*_own_of_environment(environment), *sorted(own)),
        )
        found._refuse_secrets()
        return found

    def with_store(self, place: SharedStore | None) -> Location:
        """The same with the store that the broker names; what the options say of it goes before."""
        if place is None:
            return self
        settings = [("storage.mode", place.mode), ("store.backend", place.backend), ("store.root", _quoted(place.root))]
        settings += [(f"{_OPTIONS}.{option}", _quoted(text)) for option, text in sorted(place.options.items())]
        said = dict(self.overrides)
        new = [(name, text) for name, text in settings if name not in said]
        own = [pair for pair in self.overrides if place.mode != "shared_fs" or not _is_option(pair[0])]
        # All options at once come first: they would replace single ones.
        at_once = [pair for pair in own if pair[0] == _OPTIONS]
        single = [pair for pair in own if pair[0] != _OPTIONS]
        return replace(self, overrides=(*at_once, *new, *single), store_name=place.name)

    def token(self, environment: Mapping[str, str] | None = None) -> str | None:
        """The token for the broker, looked up in this process; `None` if there is none. Never send it anywhere else."""
        environment = os.environ if environment is None else environment
        if self.token_env is not None:
            if not environment.get(self.token_env):
                raise Invalid(
                    f"{self} asks for the token in the environment variable {self.token_env}, which is not set in this "
                    f"process: set it for the driver before Spark starts, and for the executors with "
                    f"spark.executorEnv.{self.token_env}"
                )
            return environment[self.token_env]
        if self.token_file is None:
            return None
        try:
            return read_file(self.token_file).decode().strip()
        except (Invalid, UnicodeDecodeError) as error:
            raise Invalid(
                f"{self} asks for the token in the file {self.token_file}, which cannot be read in this process: put "
                "it there on the machines of the driver and of the executors"
            ) from error

    @property
    def variables(self) -> frozenset[str]:
        """The environment variables that every process must have to go there."""
        texts = [*_texts(self._file()), *(text for _, text in self.overrides)]
        named = frozenset(name for text in texts for name in variables_in(text))
        return named if self.token_env is None else named | {self.token_env}

    def settings(self, environment: Mapping[str, str] | None = None) -> Settings:
        """The settings, with the variables of this process in them."""
        environment = os.environ if environment is None else environment
        missing = sorted(self.variables - set(environment) - {self.token_env})
        if missing:
            raise Invalid(
                f"{self} refers to the environment variable {missing[0]}, which is not set in this process: set it for "
                f"the driver before Spark starts, and for the executors with spark.executorEnv.{missing[0]}"
            )
        trees = [(_FILE, expand(self._file(), _FILE, environment))]
        for name, text in self.overrides:
            if self.broker is not None and self.store_name is None and name.startswith(_STORE_GROUP):
                continue  # the broker has named no store that they could be about
            group, _, rest = name.partition(".")
            entry, dot, option = rest.partition(".")
            value: object = text
            if dot and f"{group}.{entry}" == _OPTIONS:
                value, rest = {**_held(trees), option: text}, entry
            trees.append((f'option "{name}"', expand({group: {rest: value}}, f'option "{name}"', environment)))
        return Settings.of(trees)

    def __str__(self) -> str:
        if self.broker is not None:
            return f"the broker at {self.broker}"
        chosen = dict(self.overrides)
        store = chosen.get("store.root") or "the store of its settings"
        return self.path if self.path is not None else store

    def _file(self) -> object:
        return None if self.settings_text is None else parse_yaml(self.settings_text, _FILE)

    def _check(self, settings: Settings) -> None:
        if self.path is not None:
            return
        if not settings.is_shared:
            raise Invalid(
                'option "path" is missing: write .option("path", "/var/lib/orders"), or name the store and the '
                f'metadata of its history: .option("store", …) is {_STORE}, .option("metadata", …) is {_METADATA}'
            )
        if settings.metadata.is_file and settings.metadata.path is None:
            raise Invalid(
                f'option "metadata" is missing: without a path it says where the topics are known; write {_METADATA}'
            )

    def _refuse_secrets(self) -> None:
        tree = self._file()
        for group, inner in tree.items() if isinstance(tree, Mapping) else ():
            for name, value in inner.items() if isinstance(inner, Mapping) else ():
                _refuse_secret(f"{group}.{name}", value, f"{_FILE} has {group}.{name}")
        for name, text in self.overrides:
            _refuse_secret(name, text, f'option "{name}" is')


def _refuse_secret(name: str, value: object, place: str) -> None:
    """`Invalid` if a secret stands there and not the name of a variable; its value is not repeated."""
    setting = _SETTINGS.get(name)
    if name in (_OPTIONS, _TABLE_OPTIONS):
        held = _SETTINGS[name].parse(value, source=place, strict=False) if _plain(value) else value
        for option, text in held.items() if isinstance(held, Mapping) else ():
            _refuse_secret(f"{name}.{option}", text, place)
        return
    option = name.removeprefix(f"{_OPTIONS}.").removeprefix(f"{_TABLE_OPTIONS}.")
    if name.startswith(f"{_TABLE_OPTIONS}."):
        is_secret = any(word in option.lower() for word in _SECRET_WORDS)
    else:
        is_secret = option not in OPEN | CONNECTION if option != name else setting is not None and setting.secret
    if not isinstance(value, str):
        is_secret &= isinstance(value, int) and not isinstance(value, bool)
    elif not is_secret and _USER.search(value) and not variables_in(value):
        is_secret = True
    if is_secret and not (isinstance(value, str) and variables_in(value)):
        named = option.upper().replace(".", "_")
        raise Invalid(
            f"{place} a secret, {option}, as plain text, and would be sent to every machine: write ${{{named}}} and "
            f"set that variable for the driver and, with spark.executorEnv.{named}, for the executors"
        )


def _texts(tree: object) -> Iterator[str]:
    """Every text in a tree of settings."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping | list):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _texts(part)


def _plain(value: object) -> bool:
    """Whether it is a text that stands for several options."""
    return isinstance(value, str) and "=" in value


def _held(trees: list[tuple[str, Mapping[object, object]]]) -> dict[object, object]:
    """The options of the store so far."""
    found: object = {}
    for source, tree in trees:
        store = tree.get("store")
        if isinstance(store, Mapping) and "options" in store:
            found = _SETTINGS[_OPTIONS].parse(store["options"], source=source, strict=False)
    # Their references are replaced already: what looks like one is to be taken as it is.
    held = found if isinstance(found, Mapping) else {}
    return {name: _quoted(value) if isinstance(value, str) else value for name, value in held.items()}


def _of_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The settings in `FOREBAY_…` variables; a secret one as a reference to its variable."""
    for group, inner in environment_tree(environment).items():
        assert isinstance(inner, Mapping)
        for name, text in inner.items():
            setting = _SETTINGS.get(f"{group}.{name}")
            if setting is not None and setting.secret:
                yield setting.path, f"${{{setting.environment_name}}}"
            else:
                yield f"{group}.{name}", _quoted(str(text))


def _is_option(name: str) -> bool:
    return name == _OPTIONS or name.startswith(f"{_OPTIONS}.")


def _own_of_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What `FOREBAY_…` variables say of how to reach a store, and of tables; where the store is, a broker says."""
    for name, text in _of_environment(environment):
        if name.startswith(_ALSO_OWN) and name not in ("store.root", "store.backend"):
            yield name, text


def _broker_url(text: str) -> str:
    """The address, without a slash at its end; `Invalid` shows nothing of a user or a password in it."""
    scheme, separator, rest = text.strip().rstrip("/").partition("://")
    if _USER.search(text):
        raise Invalid('option "broker" has a user or a password in it: give a token by option "tokenEnv"')
    if scheme not in ("http", "https") or not separator or not rest or set(rest) & set("?#"):
        raise Invalid(f'option "broker" is {_shown(text)}: write {_BROKER}')
    return f"{scheme}://{rest}"


def _of_urls(given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    readers: tuple[tuple[str, Callable[[str, str], list[tuple[str, str]] | None], str], ...] = (
        ("store", _store, _STORE),
        ("metadata", _metadata, _METADATA),
    )
    for option, read, allowed in readers:
        text = given.get(option)
        if text is None:
            continue
        scheme, separator, rest = text.strip().partition("://")
        found = read(scheme, rest) if separator and rest and not _USER.search(text) else None
        if found is None:
            raise Invalid(f'option "{option}" is {_shown(text)}: write {allowed}')
        yield from found


def _store(scheme: str, rest: str) -> list[tuple[str, str]] | None:
    if scheme == "file":
        chosen = [("storage.mode", "shared_fs"), ("store.backend", "directory"), ("store.root", rest)]
        return chosen if posixpath.isabs(rest) else None
    if scheme not in BACKENDS:
        return None
    return [
        ("storage.mode", "object_store"),
        ("store.backend", BACKENDS[scheme]),
        ("store.root", rest.strip("/")),
    ]


def _metadata(scheme: str, rest: str) -> list[tuple[str, str]] | None:
    if scheme == "sqlite":
        chosen = [("metadata.backend", "sqlite"), ("metadata.path", rest)]
        return chosen if posixpath.isabs(rest) else None
    if scheme not in _ETCD:
        return None
    members, slash, prefix = rest.partition("/")
    endpoints = ",".join(f"{_ETCD[scheme]}://{member.strip()}" for member in members.split(","))
    chosen = [("metadata.backend", "etcd"), ("metadata.endpoints", endpoints)]
    return [*chosen, ("metadata.prefix", f"/{prefix}")] if slash and prefix else chosen


def _absolute_paths(settings: Settings) -> Iterator[tuple[str, str]]:
    """Paths that are relative here, made absolute: tasks run elsewhere."""
    chosen = {
        "metadata.path": settings.metadata.path,
        "store.root": settings.store.root if settings.store.is_directory else None,
        "storage.handoff_root": settings.storage.handoff_root,
    }
    for name, path in chosen.items():
        if path and not posixpath.isabs(path):
            yield name, _quoted(_absolute(path))


def _absolute(path: str) -> str:
    if path == IN_MEMORY:
        raise Unsupported(f"{IN_MEMORY} lives in the memory of its owner: no other process, and so no Spark, reads it")
    return posixpath.normpath(posixpath.join(str(Path.cwd()), path))


def _text(path: str) -> str:
    try:
        return read_file(path).decode()
    except UnicodeDecodeError as error:
        raise Invalid(f"settings file {path} is not text: {error}") from error


def _quoted(text: str) -> str:
    return text.replace("${", "$${")


def _shown(text: str) -> str:
    """A URL as it was given, without a user's part, which may hold a secret."""
    return repr(_USER.sub("://…@", text)[:100])
