"""Clients that generators make from the OpenAPI document have every route, and work against a broker.

`make test` installs the generators beside the servers that tests start. One that is missing fails these tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

import forebay
from forebay.broker.table import ROUTES
from forebay.clock import SystemClock
from forebay.service.tokens import Tokens
from tests.support.brokers import running_broker, server_settings
from tests.support.waiting import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT: Final = Path(__file__).parents[2]
PROGRAMS: Final = Path(__file__).parent / "generated"
SERVERS: Final = Path(sys.prefix) / "servers" / "bin"
GENERATORS: Final = Path(sys.prefix) / "generators"
CONFIG: Final = ROOT / "docs" / "openapi-python-client.yml"
SAYS_A_WARNING: Final = re.compile(r"warn|error|skip|unsupported|⚠|🚧", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Served:
    """A broker, a token for it, and the document that it serves, in a file."""

    url: str
    token: str
    document: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A broker that asks for tokens."""
    path = tmp_path_factory.mktemp("generated")
    settings = server_settings(access="tokens")
    with forebay.open(path / "data", settings) as log:
        tokens = Tokens(log.metadata, settings.metadata.prefix, SystemClock())
        secret = tokens.create("all", scopes=["read", "write", "admin"], prefixes=["*"]).secret.reveal()
    with running_broker(path / "data", settings) as broker:
        document = path / "openapi.json"
        with broker.client() as client:
            document.write_bytes(client.get("/v1/openapi.json").raise_for_status().content)
        yield Served(broker.url, secret, document)


def run(command: Sequence[object], *, at: Path, environment: Mapping[str, str] | None = None) -> str:
    """What a program prints, with what it says about errors; a failed one fails the test with that."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=at,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE * 4,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def answer(name: str) -> dict[str, Any]:
    """What both programs are to see, each with a topic of its own."""
    return {
        "created": [name, "fsync"],
        "appended": [[0, 0, 2]],
        "read": [[0, "one"], [1, "two"]],
        "key": "anna",
        "listed": [name],
        "deleted": 204,
        "refused": [404, "unknown_topic"],
        "metrics": True,
        "health": "ok",
    }


@pytest.mark.xdist_group("generated-clients")
def test_the_generated_python_client_has_every_route_and_works(served: Served, tmp_path: Path) -> None:
    package = tmp_path / "forebay_http"
    generate = [SERVERS / "openapi-python-client", "generate", "--path", served.document, "--config", CONFIG]
    path = f"{SERVERS}{os.pathsep}{os.environ['PATH']}"  # it tidies what it has written by ruff
    said = run(
        [*generate, "--meta", "none", "--output-path", package, "--fail-on-warning"],
        at=tmp_path,
        environment={"PATH": path},
    )
    assert not SAYS_A_WARNING.search(said), said
    made = sorted(file.stem for file in package.glob("api/*/*.py") if file.stem != "__init__")
    assert made == sorted(route.name for route in ROUTES)

    program = [SERVERS / "python", PROGRAMS / "program.py", served.url, served.token]
    seen = json.loads(run(program, at=tmp_path, environment={"PYTHONPATH": str(tmp_path)}))

    assert seen == answer("shop/orders") | {"stranger": [401, "unauthenticated"], "title": "Forebay"}


@pytest.mark.xdist_group("generated-clients")
def test_the_generated_typescript_types_have_every_route_and_work(served: Served, tmp_path: Path) -> None:
    node, bin_ = GENERATORS / "node", GENERATORS / "node_modules" / ".bin"
    (tmp_path / "node_modules").symlink_to(GENERATORS / "node_modules")
    shutil.copy(PROGRAMS / "package.json", tmp_path)
    shutil.copy(PROGRAMS / "program.ts", tmp_path)
    generate = [node, bin_ / "openapi-typescript", served.document, "--default-non-nullable=false"]
    said = run([*generate, "-o", "forebay.d.ts"], at=tmp_path)
    assert not SAYS_A_WARNING.search(said), said
    # One that is missing, and one too many, is an error of types.
    names = ", ".join(f"{route.name}: true" for route in ROUTES)
    routes = 'import type { operations } from "./forebay.js";\n'
    routes += f"export const names: Record<keyof operations, true> = {{ {names} }};\n"
    (tmp_path / "routes.ts").write_text(routes, encoding="utf-8")
    options = ["--strict", "--noUncheckedIndexedAccess", "--target", "es2022", "--lib", "es2022,dom"]
    options += ["--module", "nodenext", "--moduleResolution", "nodenext"]
    run([node, bin_ / "tsc", *options, "program.ts", "routes.ts"], at=tmp_path)

    seen = json.loads(run([node, "program.js", served.url, served.token], at=tmp_path))

    assert seen == answer("shop/payments")
