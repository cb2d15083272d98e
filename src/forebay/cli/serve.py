"""`forebay serve`: topics over HTTP, from this process."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.cli.commands import command, root
from forebay.cli.invocation import Invocation
from forebay.cli.terminal import say
from forebay.errors import Unsupported


@command(
    root,
    "serve",
    examples=["forebay serve", "forebay serve --set server.port=8080", "forebay serve --settings forebay.yaml"],
)
def serve(
    run: Invocation,
    *,
    demo: Annotated[bool, typer.Option("--demo", help="Create a topic with some records to look at.")] = False,
) -> None:
    """Serve the topics of the data directory over HTTP, until SIGTERM or Ctrl-C.

    The address is bound at once; while shards are recovered, GET /v1/ready says how far that is. At the first signal
    the broker takes no new requests, finishes those under way, makes everything durable and ends with 0. A second
    signal ends it at once: nothing acknowledged is lost, but the next start has something to replay.
    """
    try:
        from forebay.broker.serve import serve as serve_log
    except ImportError as error:
        raise Unsupported(
            f'the broker needs packages that are not here ({error.name}): pip install "forebay[broker]"'
        ) from error

    if demo:
        _seed(run)
    serve_log(run.directory, run.settings, on_bound=lambda url: say(f"serving {run.directory} at {url}; {url}/docs"))


def _seed(run: Invocation) -> None:
    """A topic to look at."""
    with run.writer(create=True) as log:
        topic = log.create_topic("demo/greetings", exist_ok=True)
        if topic.offsets().next == 0:
            for number, word in enumerate(("hello", "bonjour", "hallo", "ciao", "hola")):
                topic.append(word.encode(), key=f"{number}".encode())
