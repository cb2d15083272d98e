"""What every command shares: the common options, the settings they make, and the directory or broker they name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from forebay.cli.interruptions import Interruptions
from forebay.cli.logs import LogFormat
from forebay.cli.options import DIRECTORY_DEFAULT, DIRECTORY_VARIABLE, URL_VARIABLE, assigned
from forebay.errors import Invalid

if TYPE_CHECKING:
    from forebay.disk import SystemDisk
    from forebay.settings import Settings
    from forebay.storage import Storage
    from forebay.surface.blocking import Log


@dataclass(frozen=True, kw_only=True)
class Options:
    """The common options as given: before the command's name, or after it."""

    directory: str | None = None
    broker_url: str | None = None
    settings_file: str | None = None
    assignments: Sequence[str] = ()
    log_format: LogFormat | None = None
    verbose: bool | None = None

    @property
    def assigned(self) -> dict[str, str]:
        """The settings of `--set`, by their names; `Invalid` names the one that is none."""
        return assigned("--set", self.assignments, example="wal.sync_interval_ms=200", is_name=_is_setting)

    def over(self, outer: Options) -> Options:
        """These options, and those of `outer` where nothing is said here."""
        return Options(
            directory=self.directory if self.directory is not None else outer.directory,
            broker_url=self.broker_url if self.broker_url is not None else outer.broker_url,
            settings_file=self.settings_file if self.settings_file is not None else outer.settings_file,
            assignments=[*outer.assignments, *self.assignments],
            log_format=self.log_format or outer.log_format,
            verbose=self.verbose if self.verbose is not None else outer.verbose,
        )


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """One run of one command."""

    options: Options
    interruptions: Interruptions = field(default_factory=Interruptions)

    @cached_property
    def url(self) -> str | None:
        """The broker to ask, or `None` for a data directory. What stands on the command line is meant, if one does."""
        named, directory = self.options.broker_url, self.options.directory
        if named is not None and directory is not None:
            raise Invalid("--url names a broker and --data a directory: give one of them")
        if named is not None or directory is not None:
            return named
        found = os.environ.get(URL_VARIABLE) or None
        if found is not None and os.environ.get(DIRECTORY_VARIABLE):
            raise Invalid(f"{URL_VARIABLE} and {DIRECTORY_VARIABLE} are both set: say what is meant by --url or --data")
        return found

    @property
    def directory(self) -> str:
        """The data directory, whether it exists or not; `Invalid` where a broker is named in its place."""
        self.check_local()
        named = self.options.directory
        return named if named is not None else os.environ.get(DIRECTORY_VARIABLE) or DIRECTORY_DEFAULT

    def check_local(self) -> None:
        """Raise `Invalid` if a broker is named: this command needs the files."""
        if self.url is not None:
            source = f"--url {self.url}" if self.options.broker_url is not None else f"{URL_VARIABLE}={self.url}"
            raise Invalid(
                f"this command works on the files of a data directory, and {source} names a broker: run it on the "
                "broker's machine with --data DIR"
            )

    @cached_property
    def settings(self) -> Settings:
        """The settings of the file, the environment and `--set`, in this order."""
        from forebay.settings import Settings

        return Settings.load(self.options.settings_file, _tree(self.options.assigned))

    @cached_property
    def disk(self) -> SystemDisk:
        """The machine's disk."""
        from forebay.disk import SystemDisk

        return SystemDisk(self.settings.runtime.descriptors_max)

    def reading(self, name: str | None = None) -> Log:
        """The topics to read from, or this topic: those of the broker, or of the directory beside its owner."""
        if self.url is not None:
            return self._connected(self.url)
        return self.reader() if name is None else self.reader_of(name)

    def writing(self, *, create: bool = False) -> Log:
        """The topics to change: those of the broker, or of the directory, opened for this process alone."""
        return self.writer(create=create) if self.url is None else self._connected(self.url)

    def _connected(self, url: str) -> Log:
        from forebay.cli.brokers import connected

        return connected(url)

    def reader(self) -> Storage:
        """The directory opened beside its owner; nothing is changed."""
        from forebay.storage import Storage

        return Storage.open(self.directory, self.settings, read_only=True, disk=self.disk)

    def reader_of(self, name: str) -> Storage:
        """The directory opened to read this topic: beside its owner, unless only one process can open its engine."""
        from forebay.topics import Engine, TopicName

        wanted = TopicName.parse(name)
        log = self.reader()
        if any(spec.name == wanted and spec.engine is Engine.ROCKSDB for spec in log.topics()):
            log.close()
            return self.writer()
        return log

    def writer(self, *, create: bool = False) -> Storage:
        """The directory opened for this process alone. Only with `create` is it made, so that a typing error is not."""
        from forebay.directory import LogDirectory
        from forebay.storage import Storage

        settings = self.settings
        if not create:
            LogDirectory.look(self.directory, self.disk)
        elif self.directory == ":memory:":
            raise Invalid(":memory: ends with this command: name a directory with --data")
        return Storage.open(self.directory, settings, disk=self.disk)


def _tree(assigned: Mapping[str, str]) -> dict[str, Any]:
    """`wal.sync_interval_ms=200` as `{"wal": {"sync_interval_ms": "200"}}`."""
    tree: dict[str, dict[str, str]] = {}
    for path, value in assigned.items():
        group, _, name = path.partition(".")
        tree.setdefault(group, {})[name] = value
    return tree


def _is_setting(name: str) -> bool:
    group, _, rest = name.partition(".")
    return bool(group and rest)
