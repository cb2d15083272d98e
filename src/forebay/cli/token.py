"""`forebay token`: who may use a server of this log, and for what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from forebay.cli.commands import command, group
from forebay.cli.failures import complain
from forebay.cli.invocation import Invocation
from forebay.cli.options import AsJson
from forebay.cli.terminal import readable_time, say, say_json, say_table
from forebay.errors import Corrupt, UnsupportedFormat
from forebay.wire.positions import parse_time

if TYPE_CHECKING:
    from forebay.service.tokens import AccessToken, Tokens

UNREADABLE: Final = "unreadable"
"""The state of a token whose stored value cannot be read: no server accepts it."""
REMOVED: Final = "removed"

app = group("token", help="Create, list, revoke and prune the tokens of callers of a server.")


@command(
    app,
    "create",
    examples=[
        "forebay token create shop-frontend --scope write --topics shop/",
        "forebay token create audit --scope read --topics shop/orders --topics bank/ --expires 2031-05-06T00:00:00Z",
        "forebay token create ops --scope read --scope write --scope delete --scope admin --topics '*'",
    ],
)
def create(
    run: Invocation,
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whom it stands for, in logs and quotas.")],
    scopes: Annotated[list[str], typer.Option("--scope", help="read, write, delete or admin; may be repeated.")],
    prefixes: Annotated[
        list[str],
        typer.Option(
            "--topics",
            metavar="PREFIX",
            help="shop/ for a namespace, shop/orders for a topic, '*' for all; may be repeated.",
        ),
    ],
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="Not accepted from then on.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a token and write its secret, which is shown this once and stored nowhere.

    Works while a server has the directory open; the server accepts the token within a second. The data directory is
    made if there is none, unless etcd keeps the metadata: then none is needed.
    """
    from forebay.clock import SystemClock
    from forebay.service.tokens import draft_token

    expires_at = None if expires is None else parse_time(expires, "--expires")
    # Checked first: a call that is refused makes no data directory.
    made = draft_token(SystemClock(), name, scopes=scopes, prefixes=prefixes, expires_at=expires_at)
    with _tokens(run, is_changed=True, create=True) as tokens:
        tokens.add(made.token)
    if as_json:
        say_json({**_item(made.token), "secret": made.secret.reveal()})
    else:
        say(made.secret.reveal())


@command(app, "list", examples=["forebay token list", "forebay token list --json"])
def list_tokens(run: Invocation, *, as_json: AsJson = False) -> None:
    """List all tokens, also expired and revoked ones. Their secrets are not stored, so they are not shown."""
    from forebay.clock import SystemClock

    now = SystemClock().now_ms()
    with _tokens(run, is_changed=False) as tokens:
        found, unreadable = tokens.all(), tokens.unreadable()
    for token_id, left in unreadable.items():
        complain(f'{left}; no server accepts it, and "forebay token revoke {token_id}" removes it')
    if as_json:
        for token in found:
            say_json({**_item(token), "state": token.state(now)})
        for token_id in unreadable:
            say_json({"id": token_id, "state": UNREADABLE})
    elif found or unreadable:
        rows: list[tuple[str, ...]] = [
            (
                token.token_id,
                token.name,
                ",".join(token.scopes),
                ",".join(token.prefixes),
                readable_time(token.created_at),
                "never" if token.expires_at is None else readable_time(token.expires_at),
                token.state(now),
            )
            for token in found
        ]
        rows += [(token_id, "", "", "", "", "", UNREADABLE) for token_id in unreadable]
        say_table(("id", "name", "scopes", "topics", "created", "expires", "state"), rows)


@command(app, "revoke", examples=["forebay token revoke 3f0c6a1e9b2d4c58"])
def revoke(
    run: Invocation,
    *,
    token_id: Annotated[str, typer.Argument(metavar="ID", help='The id that "forebay token list" shows.')],
    as_json: AsJson = False,
) -> None:
    """End a token for good. A server that runs refuses it within a second."""
    with _tokens(run, is_changed=True) as tokens:
        try:
            token = tokens.revoke(token_id)
        except (Corrupt, UnsupportedFormat):
            # What it was cannot be kept, for a list of what was revoked: it goes as a whole.
            tokens.remove_unreadable(token_id)
            item, text = {"id": token_id, "state": REMOVED}, f"{token_id} could not be read: it is removed"
        else:
            item, text = _item(token), f"{token.token_id} of {token.name} is revoked"
    if as_json:
        say_json(item)
    else:
        say(text)


@command(app, "prune", examples=["forebay token prune"])
def prune(run: Invocation, *, as_json: AsJson = False) -> None:
    """Remove tokens that were revoked or have expired over 30 days ago. The list shows the others."""
    with _tokens(run, is_changed=True) as tokens:
        removed = tokens.prune()
    for token in removed:
        if as_json:
            say_json(_item(token))
        else:
            say(f"{token.token_id} of {token.name} is removed")


@contextmanager
def _tokens(run: Invocation, *, is_changed: bool, create: bool = False) -> Iterator[Tokens]:
    """The tokens of the metadata store, which is opened beside the owner of the data directory.

    Where a service keeps the metadata no directory is needed.
    """
    from forebay.clock import SystemClock
    from forebay.directory import MARKER, LogDirectory, NoDirectory
    from forebay.inspection.directory import metadata_of
    from forebay.service.tokens import Tokens

    clock = SystemClock()
    is_served = run.settings.metadata.is_served
    if create and not is_served and not run.disk.exists(f"{run.directory}/{MARKER}"):
        run.writer(create=True).close()
    directory = NoDirectory() if is_served else LogDirectory.look(run.directory, run.disk)
    with metadata_of(directory, run.settings, run.disk, clock, read_only=not is_changed) as store:
        yield Tokens(store, run.settings.metadata.prefix, clock)


def _item(token: AccessToken) -> dict[str, Any]:
    return {
        "id": token.token_id,
        "name": token.name,
        "scopes": token.scopes,
        "topics": token.prefixes,
        "created_at": token.created_at,
        "expires_at": token.expires_at,
        "revoked_at": token.revoked_at,
    }
