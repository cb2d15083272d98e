"""The options and arguments that more than one command has, each written once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from forebay.cli.logs import LogFormat
from forebay.errors import Invalid

DIRECTORY_VARIABLE = "FOREBAY_DATA"
DIRECTORY_DEFAULT = "data"
URL_VARIABLE = "FOREBAY_URL"

DirectoryOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help=f"The data directory [default: ${DIRECTORY_VARIABLE}, else ./{DIRECTORY_DEFAULT}].",
        show_default=False,
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help=f"A broker in place of a data directory: http://HOST:PORT [default: ${URL_VARIABLE}].",
        show_default=False,
    ),
]
RefusedUrlOption = Annotated[str | None, typer.Option("--url", hidden=True)]
"""The same where a command needs the files: it is understood, and refused with what to do."""
SettingsOption = Annotated[
    str | None,
    typer.Option("--settings", metavar="FILE", help="Settings in YAML.", show_default=False),
]
TableFormatOption = Annotated[str, typer.Option(help="What kind of table it is: iceberg or delta.")]
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
OneTopic = Annotated[str | None, typer.Argument(metavar="[TOPIC]", help="This topic alone.", show_default=False)]
ToOption = Annotated[str, typer.Option("--to", metavar="PLACE", help="earliest, latest, an offset or a time.")]
PartitionOption = Annotated[int | None, typer.Option(help="This partition alone.", show_default=False)]
CountOption = Annotated[int | None, typer.Option("--count", "-n", help="So many records.", show_default=False)]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask. Needed where no one can answer.")]
MASTER_DEFAULT = "local[*]"
MasterOption = Annotated[
    str,
    typer.Option(metavar="URL", help="Where Spark runs: local[*], spark://HOST:PORT, sc://HOST:PORT, yarn, k8s://…"),
]
ConfOption = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="NAME=VALUE", help="One of Spark's own settings.", show_default=False),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]


def assigned(
    option: str, given: Iterable[str] | None, *, example: str, is_name: Callable[[str], bool] = bool
) -> dict[str, str]:
    """What is given as `--option NAME=VALUE`, by name; later ones win. `Invalid` names the one that is not so."""
    values = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not equals or not is_name(name.strip()):
            raise Invalid(f"{option} {one!r:.100} is not NAME=VALUE, as in {option} {example}")
        values[name.strip()] = value.strip()
    return values
