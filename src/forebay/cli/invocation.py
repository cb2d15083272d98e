"""What every command shares: the common options, the settings they make, and the directory they name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli.assignments import assigned
from forebay.cli.interruptions import Interruptions
from forebay.cli.logs import LogFormat
from forebay.errors import Invalid

if TYPE_CHECKING:
    from forebay.disk import SystemDisk
    from forebay.settings import Settings
    from forebay.storage import Storage

DIRECTORY_VARIABLE = "FOREBAY_DATA"
DIRECTORY_DEFAULT = "data"

DirectoryOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help=f"The data directory [default: ${DIRECTORY_VARIABLE}, else ./{DIRECTORY_DEFAULT}].",
        show_default=False,
    ),
]
SettingsOption = Annotated[
    str | None,
    typer.Option("--settings", metavar="FILE", help="Settings in YAML.", show_default=False),
]
TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="namespace/topic, or topic for default/topic.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON.")]
AssignmentsOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="One setting, as wal.sync_interval_ms=200.", show_default=False),
]
LogFormatOption = Annotated[
    LogFormat | None,
    typer.Option("--log-format", help="How log lines on stderr are written [default: text].", show_default=False),
]
VerboseOption = Annotated[
    bool | None,
    typer.Option("--verbose", "-v", help="Log what is done, not only what is wrong.", show_default=False),
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The common options as given: before the command's name, or after it."""

    directory: str | None = None
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

    @property
    def directory(self) -> str:
        """The data directory, whether it exists or not."""
        named = self.options.directory
        return named if named is not None else os.environ.get(DIRECTORY_VARIABLE) or DIRECTORY_DEFAULT

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
        from forebay.storage import Storage
        from forebay.storage.directory import LogDirectory

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
