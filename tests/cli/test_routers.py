"""`forebay router`: define, alter, pause, list, run and delete routers."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import forebay
from tests.cli.rig import Shell, one_line
from tests.support.processes import hear

pytestmark = pytest.mark.slow


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    with forebay.open(str(tmp_path / "log")) as log:
        log.create_topic("shop/orders", partitions=2)
        log.create_topic("shop/eu")
    return Shell(tmp_path / "log")


def test_a_router_is_defined_altered_paused_listed_and_deleted(shell: Shell) -> None:
    assert shell.ok("router", "list").out == ""
    created = shell.ok("router", "create", "eu", "shop/orders", "--to", "shop/eu", "--tag", "eu", "--header", "kind")
    assert created.out == "eu is created\n"
    altered = shell.ok(
        "router", "alter", "eu", "--key-prefix", "k", "--header", "kind=a=b", "--set-header", "via=eu", "--json"
    ).items[0]
    assert altered["rule"] == {"key_prefix": "k", "headers": ["kind=a=b"], "set_headers": ["via=eu"]}
    stopping = shell.ok("router", "alter", "eu", "--on-refused", "stop", "--set-header", "via=eu", "--json").items[0]
    assert stopping["rule"] == {"set_headers": ["via=eu"], "on_refused": "stop"}
    assert "stop" in shell.ok("router", "status", "eu").out
    shown = shell.ok("router", "status", "eu", "--json").items[0]
    assert (shown["lost"], shown["failures"], shown["routed"]) == ({}, {}, 0)
    shell.ok("router", "pause", "eu")
    [listed] = shell.ok("router", "list", "--json").items
    assert (listed["state"], listed["lag"], listed["sources"]) == ("paused", 0, ["shop/orders"])
    shell.ok("router", "resume", "eu")
    assert "defined" in shell.ok("router", "list").out
    assert "via=eu" in shell.ok("router", "status", "eu").out

    refused = shell.run("router", "delete", "eu")
    assert refused.code == 2 and one_line(refused.err) and "--yes" in refused.err
    assert shell.ok("router", "delete", "eu", "--yes").out == "eu is deleted\n"
    assert shell.ok("router", "list").out == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["create", "r", "shop/orders", "--to", "shop/orders"], "circle"),
        (["create", "r", "shop/orders", "--to", "shop/absent"], "shop/absent"),
        (["create", "r", "shop/orders", "--to", "shop/eu", "--from", "17"], "earliest, latest or a time"),
        (["create", "r", "shop/orders", "--to", "shop/eu", "--set-header", "x"], "NAME=VALUE"),
        (["create", "r/s", "shop/orders", "--to", "shop/eu"], "router's name"),
        (["create", "r", "shop/orders", "--to", "shop/eu", "--on-refused", "wait"], "skip or stop"),
        (["alter", "r"], "forebay router list"),
        (["pause", "r"], "forebay router list"),
        (["delete", "r", "--yes"], "forebay router list"),
        (["status", "r"], "forebay router list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value[:2]),
)
def test_what_cannot_be_is_refused_in_words(shell: Shell, words: list[str], expected: str) -> None:
    refused = shell.run("router", *words)

    assert refused.code == 2
    assert one_line(refused.err) and expected in refused.err


def test_routers_run_until_they_are_interrupted(shell: Shell, tmp_path: Path) -> None:
    shell.ok("router", "create", "eu", "shop/orders", "--to", "shop/eu", "--tag", "eu")
    with forebay.open(str(tmp_path / "log")) as log:
        for number in range(20):
            log.topic("shop/orders").append(b"%d" % number, tag="eu" if number % 2 else "us")
    command = [sys.executable, "-m", "forebay.cli", "--data", str(tmp_path / "log"), "router", "run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert "1 routers run" in hear(child)
        with forebay.open(str(tmp_path / "log"), read_only=True) as log:
            stream = log.topic("shop/eu").follow(forebay.EARLIEST, timeout=240)
            found = [next(stream).value for _ in range(10)]
        child.send_signal(signal.SIGINT)
        assert hear(child) == "stopped"
    assert child.returncode == 0
    assert sorted(found, key=lambda value: int(value or b"")) == [b"%d" % number for number in range(1, 20, 2)]
