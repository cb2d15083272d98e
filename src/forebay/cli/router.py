"""`forebay router`: rules that move records from topics to a topic, each once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli.commands import command, group
from forebay.cli.interruptions import Interrupted
from forebay.cli.invocation import Invocation
from forebay.cli.options import AsJson, YesOption, assigned
from forebay.cli.terminal import confirm, flush, readable_time, say, say_json, say_table
from forebay.errors import Corrupt, UnsupportedFormat
from forebay.wire.positions import parse_start

if TYPE_CHECKING:
    from forebay.routing import RouterSpec, RouterStatus
    from forebay.surface import Log, Routers

app = group("router", help="Create, alter, pause, resume, delete, list, show and run routers.")

Name = Annotated[str, typer.Argument(metavar="ROUTER", help="The name of the router.")]
TagsOption = Annotated[
    list[str] | None, typer.Option("--tag", help="Take records with this tag; may be repeated.", show_default=False)
]
KeyPrefixOption = Annotated[
    str, typer.Option("--key-prefix", metavar="TEXT", help="Take records whose key begins so.", show_default=False)
]
HeadersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--header",
        metavar="NAME[=VALUE]",
        help="Take records with this header; may be repeated, then all are needed.",
        show_default=False,
    ),
]
KeyOption = Annotated[
    str, typer.Option("--key", metavar="FROM", help="What becomes the key: keep, none, tag or header:NAME.")
]
SetHeadersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set-header", metavar="NAME=VALUE", help="Add or replace a header; may be repeated.", show_default=False
    ),
]
RemoveHeadersOption = Annotated[
    list[str] | None,
    typer.Option("--remove-header", metavar="NAME", help="Leave a header out; may be repeated.", show_default=False),
]
OnRefusedOption = Annotated[
    str,
    typer.Option(
        "--on-refused", metavar="WHAT", help="A record that the destination can never hold: skip it, or stop at it."
    ),
]


@command(
    app,
    "create",
    examples=[
        "forebay router create eu-orders shop/orders --to shop/orders-eu --tag eu",
        "forebay router create audit shop/orders shop/refunds --to audit/all --from earliest --set-header via=audit",
    ],
    by_url=True,
)
def create(
    run: Invocation,
    *,
    name: Name,
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE...", help="The topics to read.")],
    destination: Annotated[str, typer.Option("--to", metavar="TOPIC", help="The topic to fill.")],
    start: Annotated[str, typer.Option("--from", metavar="PLACE", help="earliest, latest or a time.")] = "latest",
    tags: TagsOption = None,
    key_prefix: KeyPrefixOption = "",
    headers: HeadersOption = None,
    key: KeyOption = "keep",
    set_headers: SetHeadersOption = None,
    remove_headers: RemoveHeadersOption = None,
    on_refused: OnRefusedOption = "skip",
    as_json: AsJson = False,
) -> None:
    """Define a router. From then on it misses nothing, also before a process runs it."""
    rule = _rule(tags, key_prefix, headers, key, set_headers, remove_headers, on_refused)
    position = parse_start(start, "--from")
    with _written(run) as routers:
        made = routers.create(name, sources=sources, destination=destination, start=position, **rule)
    _say_router(made, f"{made.name} is created", as_json=as_json)


@command(app, "alter", examples=["forebay router alter eu-orders --tag eu --tag uk"], by_url=True)
def alter(
    run: Invocation,
    *,
    name: Name,
    tags: TagsOption = None,
    key_prefix: KeyPrefixOption = "",
    headers: HeadersOption = None,
    key: KeyOption = "keep",
    set_headers: SetHeadersOption = None,
    remove_headers: RemoveHeadersOption = None,
    on_refused: OnRefusedOption = "skip",
    as_json: AsJson = False,
) -> None:
    """Give a router a new rule, as a whole: what is not said is no condition any more.

    It holds for records that are routed from then on.
    """
    rule = _rule(tags, key_prefix, headers, key, set_headers, remove_headers, on_refused)
    with _written(run) as routers:
        altered = routers.alter(name, **rule)
    _say_router(altered, f"{altered.name} is altered", as_json=as_json)


@command(app, "pause", examples=["forebay router pause eu-orders"], by_url=True)
def pause(run: Invocation, *, name: Name, as_json: AsJson = False) -> None:
    """Have a router wait until it is resumed."""
    with _written(run) as routers:
        paused = routers.pause(name)
    _say_router(paused, f"{name} is paused", as_json=as_json)


@command(app, "resume", examples=["forebay router resume eu-orders"], by_url=True)
def resume(run: Invocation, *, name: Name, as_json: AsJson = False) -> None:
    """Have a router go on where it stopped."""
    with _written(run) as routers:
        resumed = routers.resume(name)
    _say_router(resumed, f"{name} goes on", as_json=as_json)


@command(app, "delete", examples=["forebay router delete eu-orders --yes"], by_url=True)
def delete(run: Invocation, *, name: Name, yes: YesOption = False) -> None:
    """Remove a router. What it has routed stays."""
    with _written(run) as routers:
        with suppress(Corrupt, UnsupportedFormat):
            # Asked for first, so that a name that is not there is not asked about.
            routers.get(name)
        confirm(f"router {name}", yes=yes)
        routers.delete(name)
    say(f"{name} is deleted")


@command(app, "list", examples=["forebay router list", "forebay router list --json"], by_url=True)
def list_routers(run: Invocation, *, as_json: AsJson = False) -> None:
    """List all routers, with their topics, state and lag."""
    with _read(run) as routers:
        found = routers.statuses()
    if as_json:
        for status in found:
            say_json(_shown(status))
    elif found:
        rows = [
            (
                status.router.name,
                ", ".join(source.topic for source in status.router.sources),
                status.router.destination,
                status.state,
                "?" if status.lag is None else status.lag,
            )
            for status in found
        ]
        say_table(("name", "from", "to", "state", "lag"), rows)


@command(
    app, "status", examples=["forebay router status eu-orders", "forebay router status eu-orders --json"], by_url=True
)
def status(run: Invocation, *, name: Name, as_json: AsJson = False) -> None:
    """Show a router: its topics and rule, its state, and how many records are not routed yet."""
    with _read(run) as routers:
        found = routers.status(name)
    if as_json:
        say_json(_shown(found))
        return
    rows: list[tuple[object, ...]] = [
        ("name", found.router.name),
        ("from", ", ".join(source.topic for source in found.router.sources)),
        ("to", found.router.destination),
        ("state", found.state),
        ("lag", "?" if found.lag is None else found.lag),
        *((f"lost, {reason}", count) for reason, count in sorted(found.lost.items())),
        *((f"waits at {place}", why) for place, why in sorted(found.failures.items())),
        ("created", readable_time(found.router.created_at)),
        *((condition, text) for condition, text in _rule_shown(found.router).items()),
    ]
    say_table(("", ""), rows)


@command(app, "run", examples=["forebay router run"])
def run_routers(run: Invocation) -> None:
    """Run all routers of a data directory until Ctrl-C. A broker runs those of its directory by itself."""
    from forebay.routers import Routers

    with run.writer() as log, run.interruptions.heeded():
        routers = Routers(log)
        try:
            with routers.running():
                say(f"{len(routers.all())} routers run; end with Ctrl-C")
                flush()
                threading.Event().wait()
        except Interrupted:
            say("stopped")


@contextmanager
def _written(run: Invocation) -> Iterator[Routers]:
    """The routers to change: those of the broker, or of the directory, opened for this process alone."""
    with run.writing() as log:
        yield _routers_of(log)


@contextmanager
def _read(run: Invocation) -> Iterator[Routers]:
    """The routers to look at: those of the broker, or of the directory beside its owner."""
    with run.reading() as log:
        yield _routers_of(log)


def _routers_of(log: Log) -> Routers:
    from forebay.storage import Storage

    if isinstance(log, Storage):
        from forebay.routers import Routers

        return Routers(log)
    from forebay.client import RemoteLog

    assert isinstance(log, RemoteLog), "a log is of this process, or of a broker"
    return log.routers


def _rule(
    tags: list[str] | None,
    key_prefix: str,
    headers: list[str] | None,
    key: str,
    set_headers: list[str] | None,
    remove_headers: list[str] | None,
    on_refused: str,
) -> dict[str, Any]:
    """What the options of a rule say, as `Routers.create` takes it."""
    matches = {name: value.encode() if equals else None for name, equals, value in _parted(headers or [])}
    changes = assigned("--set-header", set_headers or [], example="via=audit")
    return {
        "tags": tags or [],
        "key_prefix": key_prefix.encode(),
        "headers": matches,
        "key": key,
        "set_headers": {name: value.encode() for name, value in changes.items()},
        "remove_headers": remove_headers or [],
        "on_refused": on_refused,
    }


def _parted(texts: list[str]) -> list[tuple[str, str, str]]:
    return [text.partition("=") for text in texts]


def _say_router(router: RouterSpec, text: str, *, as_json: bool) -> None:
    if as_json:
        say_json(_definition(router))
    else:
        say(text)


def _definition(router: RouterSpec) -> dict[str, Any]:
    return {
        "name": router.name,
        "sources": [source.topic for source in router.sources],
        "destination": router.destination,
        "is_paused": router.is_paused,
        "created_at": router.created_at,
        "rule": _rule_shown(router),
    }


def _rule_shown(router: RouterSpec) -> dict[str, Any]:
    """The conditions and changes of the present rule, those that there are. Bytes that are no text are in hex."""
    rule = router.rule
    shown = {
        "tags": list(rule.tags),
        "key_prefix": _text(rule.key_prefix),
        "headers": [
            match.name if match.value is None else f"{match.name}={_text(match.value)}" for match in rule.headers
        ],
        "key": "" if rule.key == "keep" else rule.key,
        "set_headers": [f"{name}={_text(value)}" for name, value in rule.set_headers],
        "remove_headers": list(rule.remove_headers),
        "on_refused": "" if rule.on_refused == "skip" else str(rule.on_refused),
    }
    return {name: value for name, value in shown.items() if value}


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"0x{value.hex()}"


def _shown(status: RouterStatus) -> dict[str, Any]:
    counts = {"routed": status.routed, "left_out": status.left_out, "lost": status.lost, "failures": status.failures}
    return {**_definition(status.router), "state": status.state, "lag": status.lag, **counts}
