"""`forebay conformance`: whether a running broker keeps the contract of the HTTP API."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from forebay.cli.commands import command, root
from forebay.cli.failures import PROBLEM
from forebay.cli.invocation import Invocation
from forebay.cli.terminal import flush, say
from forebay.errors import Invalid, Unavailable, Unsupported

REQUEST_SECONDS = 60.0


@command(
    root,
    "conformance",
    examples=["forebay conformance http://127.0.0.1:7878", "FOREBAY_TOKEN=… forebay conformance https://broker:7878"],
    by_url=True,
)
def conformance(
    _run: Invocation,
    url: Annotated[str, typer.Argument(help="Where the broker serves, such as http://127.0.0.1:7878.")],
    *,
    verify: Annotated[
        str | None, typer.Option("--verify", help="The certificates to trust (PEM), for https; else the system's.")
    ] = None,
) -> int:
    """Check a running broker against the contract of the HTTP API, from outside.

    Every check makes topics in a namespace of its own, conformance-…, and removes them; it changes nothing else. One
    line for each check, then a summary; exit code 1 if a check failed. A broker that asks for tokens needs one with
    every right on all topics, in FOREBAY_TOKEN.
    """
    try:
        import httpx

        from forebay.cli.brokers import TOKEN_VARIABLE
        from forebay.testing.checks.conformance import run_checks
    except ImportError as error:
        raise Unsupported(f'this needs packages that are not here ({error.name}): pip install "forebay[client]"') from (
            error
        )

    if not url.startswith(("http://", "https://")):
        raise Invalid(f"the address of a broker begins with http:// or https://, not {url!r:.80}")
    token = os.environ.get(TOKEN_VARIABLE)
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    count = failed = 0
    with httpx.Client(base_url=url, timeout=REQUEST_SECONDS, headers=headers, verify=verify or True) as client:
        try:
            client.get("/v1/health")
        except httpx.TransportError as error:
            raise Unavailable(f"no broker answers at {url}: {error}; is it started, and the address right?") from error
        for done in run_checks(client):
            count += 1
            failed += done.failure is not None
            say(f"ok      {done.name}" if done.failure is None else f"FAILED  {done.name}: {done.failure}")
            flush()
    say(f"{count} checks, {failed} failed")
    return PROBLEM if failed else 0
