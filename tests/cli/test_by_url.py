"""Commands say and end the same on a data directory and on a broker that is named by `--url`."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from typer.testing import CliRunner

from forebay.cli import brokers
from forebay.cli.app import app
from forebay.cli.invocation import DIRECTORY_VARIABLE, URL_VARIABLE
from tests.cli.rig import Outcome, Shell, one_line
from tests.cli.test_help_and_docs import COMMANDS
from tests.cli.test_without_data import ON_SPARK, WORDS
from tests.support.brokers import running_broker, server_settings

CHANGING: Final = (
    (r"[0-9a-f]{32}", "ID"),
    (r"\d{4}-\d\d-\d\dT[0-9:.]+Z", "TIME"),
    (r'"(created_at|seconds)":[0-9.]+', r'"\1":0'),
    (r"in [0-9.]+ s \(\d+/s\)", "in 0 s"),
)
"""What differs from run to run."""


BY_URL: Final = {
    "topic create", "topic list", "topic show", "topic alter", "topic delete", "produce", "consume", "records get",
    "records delete", "group list", "group show", "group reset", "group delete",
}  # fmt: skip


class Line(NamedTuple):
    """One command, and what is written into it."""

    words: str
    stdin: bytes = b""


def _item(value: str, **more: object) -> bytes:
    fields = "".join(f',"{name}":{content!r}'.replace("'", '"') for name, content in more.items())
    return f'{{"value":"{value}"{fields}}}\n'.encode()


ORDERS: Final = b"".join(
    _item(f"v{number}", key=f"k{number % 3}", tag="eu" if number % 2 else "us", timestamp=1000 + number)
    for number in range(20)
)
MADE: Final = (Line("topic create shop/orders"), Line("produce shop/orders --format json", ORDERS))
SCRIPTS: Final = {
    "topics": (
        Line("topic list"),
        Line("topic create shop/orders --partitions 2 --ttl 7d --durability fsync"),
        Line("topic create shop/orders"),
        Line("topic create shop/orders --exist-ok"),
        Line("topic create 'bad name!'"),
        Line("topic create shop/other --partitions 0"),
        Line("topic create shop/other --cap-bytes 10MiB --compression zstd"),
        Line("topic list"),
        Line("topic list --json"),
        Line("topic alter shop/orders --partitions 3"),
        Line("topic alter shop/orders --partitions 1"),
        Line("topic alter shop/orders --cap-records 5 --json"),
        Line("topic alter shop/none --cap-records 5"),
        Line("topic alter shop/orders"),
        Line("topic delete shop/orders"),
        Line("topic delete shop/orders --yes"),
        Line("topic delete shop/orders --yes"),
        Line("topic show shop/orders"),
        Line("topic list"),
    ),
    "produce and consume": (
        *MADE,
        Line("consume shop/orders"),
        Line("consume shop/orders --format json"),
        Line("consume shop/orders --format table"),
        Line("consume shop/orders --format raw --count 3"),
        Line("consume shop/orders --from 5 --until 9"),
        Line("consume shop/orders --from 1005ms --until 1009ms"),
        Line("consume shop/orders --from latest"),
        Line("consume shop/orders --from 500"),
        Line("consume shop/orders --partition 7"),
        Line("consume shop/orders --from earliest --follow --count 20 --format json"),
        Line("consume shop/orders --follow --timeout 0.05"),
        Line("consume shop/orders --follow --from 18 --until end"),
        Line("consume shop/none"),
        Line("produce shop/none", b"one\n"),
        Line("produce shop/orders --producer 7 --json", b"one\ntwo\n"),
        Line("produce shop/orders --producer 7 --json", b"three\n"),
        Line("produce shop/orders --format json", _item("good") + b"{bad\n"),
        Line("consume shop/orders --from 20"),
    ),
    "records": (
        *MADE,
        Line("records get shop/orders --key k1"),
        Line("records get shop/orders --key k1 --history --format json"),
        Line("records get shop/orders --tag eu --count 4"),
        Line("records get shop/orders --at-time 1007ms"),
        Line("records get shop/orders --at-time 9999ms"),
        Line("records get shop/orders --key none"),
        Line("records get shop/none --key none"),
        Line("records delete shop/orders --key k1"),
        Line("records delete shop/orders --key k1 --yes"),
        Line("records delete shop/orders --tag us --yes --json"),
        Line("records delete shop/orders --partition 0 --offsets 10-12 --yes"),
        Line("records delete shop/orders --partition 0 --before 5 --yes"),
        Line("consume shop/orders --format json"),
        Line("consume shop/orders"),
    ),
    "groups": (
        *MADE,
        Line("group list"),
        Line("group show billing"),
        Line("group reset billing shop/orders --to earliest"),
        Line("group reset billing shop/orders --to 7 --json"),
        Line("group reset billing shop/orders --to 700"),
        Line("group reset billing shop/none --to 7"),
        Line("group list"),
        Line("group list --json"),
        Line("group show billing"),
        Line("group show billing --json"),
        Line("group delete billing"),
        Line("group delete billing --yes"),
        Line("group list"),
    ),
}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable names a place, an absent broker is soon given up, and one in this process audits nothing."""
    monkeypatch.setattr(logging.getLogger("forebay.audit"), "disabled", True)
    for name in (DIRECTORY_VARIABLE, URL_VARIABLE, brokers.TOKEN_VARIABLE, brokers.AUTHORITY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(brokers, "REACH_SECONDS", 0.2)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with running_broker(tmp_path / "served") as broker:
        yield broker.url


def _by_url(url: str, *words: str, stdin: bytes = b"") -> Outcome:
    result = CliRunner().invoke(app, [*words, "--url", url], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr, result.stdout_bytes)


def _stable(outcome: Outcome) -> tuple[int, str, str]:
    texts = [outcome.out, outcome.err]
    for pattern, plain in CHANGING:
        texts = [re.sub(pattern, plain, text) for text in texts]
    return outcome.code, texts[0], texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_command_says_and_ends_the_same_by_url(name: str, tmp_path: Path, url: str) -> None:
    shell = Shell(tmp_path / "embedded")
    # A directory is made by its first topic, a broker has one from the start.
    shell.ok("topic", "create", "shop/first")
    _by_url(url, "topic", "create", "shop/first")

    for line in SCRIPTS[name]:
        words = line.words.replace("'bad name!'", "bad\nname!").split(" ")
        embedded = _stable(shell.run(*words, stdin=line.stdin))
        asked = _stable(_by_url(url, *words, stdin=line.stdin))

        assert asked == embedded, line.words


def test_show_gives_what_the_broker_knows(url: str) -> None:
    _by_url(url, "topic", "create", "shop/orders", "--partitions", "2")
    _by_url(url, "produce", "shop/orders", "--partition", "1", stdin=b"one\ntwo\n")

    shown = _by_url(url, "topic", "show", "shop/orders", "--json")
    text = _by_url(url, "topic", "show", "shop/orders")

    item = shown.items[0]
    assert (item["name"], item["url"], item["partitions"]) == ("shop/orders", url, 2)
    assert [(shard["partition"], shard["offsets"]["next"]) for shard in item["shards"]] == [(0, 0), (1, 2)]
    assert "directory" not in item and all("directory" not in shard for shard in item["shards"])
    assert f"the broker at {url}" in text.out and "next 2" in text.out
    assert (shown.code, text.code, text.err) == (0, 0, "")


def test_a_broker_that_is_not_there_is_unavailable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"

        outcome = _by_url(url, "topic", "list")

    assert outcome.code == 4
    assert one_line(outcome.err) and url in outcome.err and '"forebay serve"' in outcome.err


@pytest.mark.parametrize("url", ["ftp://host", "http://user:pw42@host", "nonsense", "http://"])
def test_what_is_no_address_of_a_broker_is_refused(url: str) -> None:
    outcome = _by_url(url, "topic", "list")

    assert outcome.code == 2
    assert one_line(outcome.err) and "pw42" not in outcome.err


def test_a_token_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell(tmp_path / "served")
    token = shell.ok("token", "create", "reader", "--scope", "read", "--topics", "*").out.split()[-1]
    shell.ok("topic", "create", "shop/orders")
    with running_broker(shell.directory, server_settings(access="tokens")) as broker:
        without = _by_url(broker.url, "topic", "list")
        monkeypatch.setenv(brokers.TOKEN_VARIABLE, token)
        listed = _by_url(broker.url, "topic", "list", "--json")
        refused = _by_url(broker.url, "topic", "create", "shop/more")

    assert without.code == 2 and one_line(without.err)
    assert [item["name"] for item in listed.items] == ["shop/orders"]
    assert refused.code == 2 and one_line(refused.err) and token not in refused.err


def test_a_broker_and_a_directory_are_not_named_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell(tmp_path / "log")
    shell.ok("topic", "create", "shop/orders")

    both = shell.run("topic", "list", "--url", "http://127.0.0.1:1")
    before = CliRunner().invoke(app, ["--url", "http://127.0.0.1:1", "topic", "list", "--data", "data"])
    monkeypatch.setenv(URL_VARIABLE, "http://127.0.0.1:1")
    directory = shell.run("topic", "list")
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(shell.directory))
    neither = CliRunner().invoke(app, ["topic", "list"])

    assert both.code == before.exit_code == neither.exit_code == 2
    assert "--url" in both.err and "--data" in both.err and one_line(both.err)
    assert URL_VARIABLE in neither.stderr and DIRECTORY_VARIABLE in neither.stderr
    assert directory.code == 0 and "shop/orders" in directory.out


def test_the_environment_names_a_broker(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL_VARIABLE, url)

    result = CliRunner().invoke(app, ["topic", "create", "shop/orders"])

    assert result.exit_code == 0
    assert "shop/orders" in _by_url(url, "topic", "list").out


@pytest.mark.parametrize("path", sorted({" ".join(path) for path, _ in COMMANDS} - BY_URL - {"conformance", "top"}))
def test_a_command_that_needs_the_files_refuses(path: str) -> None:
    words = {**WORDS, **ON_SPARK, "topic move": "shop/orders --to other", "serve": ""}[path]

    outcome = _by_url("http://127.0.0.1:1", *path.split(), *words.split())

    assert outcome.code == 2
    assert one_line(outcome.err) and "--data DIR" in outcome.err


@pytest.mark.parametrize("path", sorted(BY_URL))
def test_no_command_takes_the_files_where_a_broker_is_named(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.txt").write_text("one\n")

    outcome = _by_url("http://127.0.0.1:1", *path.split(), *WORDS[path].split())

    assert (outcome.code, outcome.out) == (4, "")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "more.txt"]
