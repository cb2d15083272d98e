"""Commands say and end the same on a data directory and on a broker that is named by `--url`."""

from __future__ import annotations

import logging
import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

import forebay
from forebay.cli import brokers
from forebay.cli.options import DIRECTORY_VARIABLE, URL_VARIABLE
from forebay.settings import Settings
from tests.cli.rig import Outcome, Shell, one_line
from tests.cli.test_help_and_docs import COMMANDS
from tests.cli.test_without_data import ON_SPARK, WORDS
from tests.support.brokers import running_broker, server_settings
from tests.support.commands import invoke
from tests.support.waiting import until

CHANGING: Final = (
    (r"[0-9a-f]{32}", "ID"),
    (r"\d{4}-\d\d-\d\dT[0-9:.]+Z", "TIME"),
    (r'"(created_at|sealed_at|seconds)":[0-9.]+', r'"\1":0'),
    (r"in [0-9.]+ s \(\d+/s\)", "in 0 s"),
)
"""What differs from run to run."""


BY_URL: Final = {
    "topic create", "topic list", "topic show", "topic alter", "topic copy", "topic seal", "topic unseal",
    "topic export", "topic delete", "shard list", "shard status", "produce", "consume", "records get", "records delete",
    "records erase", "group list", "group show", "group reset", "group delete", "du", "router create", "router alter",
    "router pause", "router resume", "router delete", "router list", "router status", "subscription create",
    "subscription alter", "subscription list", "subscription show", "subscription pause", "subscription resume",
    "subscription seek", "subscription peek", "subscription consume", "subscription delete", "deadletter list",
    "deadletter show", "deadletter replay", "deadletter purge", "history backfill", "history profile", "table lake",
    "shard take-over",
}  # fmt: skip


PIPELINES: Final = {"pipeline run", "pipeline plan"}
"""They ask a broker too, once they have read a file."""


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
        Line("topic alter shop/orders --on-owner-loss take-over --json"),
        Line("shard take-over shop/orders[0]"),
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
    "seal and export": (
        *MADE,
        Line("topic export shop/orders"),
        Line("topic export shop/orders --json"),
        Line("topic export shop/none"),
        Line("topic seal shop/orders"),
        Line("topic seal shop/orders --json"),
        Line("topic export shop/orders"),
        Line("topic seal shop/none"),
        Line("topic unseal shop/orders"),
        Line("topic unseal shop/none"),
        Line("produce shop/orders", b"more\n"),
        Line("consume shop/orders --from 19"),
        Line("topic create shop/live --durability ephemeral"),
        Line("topic seal shop/live"),
        Line("topic export shop/live"),
        Line("topic unseal shop/live"),
    ),
    "copy": (
        *MADE,
        Line("topic copy shop/orders shop/more"),
        Line("topic copy shop/orders shop/more --json"),
        Line("topic copy shop/orders shop/wide --partitions 3 --json"),
        Line("topic copy shop/orders shop/wide --partitions 4"),
        Line("topic copy shop/orders shop/orders"),
        Line("topic copy shop/none shop/more"),
        Line("records delete shop/orders --key k1 --yes"),
        Line("topic copy shop/orders shop/more"),
        Line("consume shop/more --format json"),
        Line("topic list"),
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
    "subscriptions": (
        *MADE,
        Line("subscription list"),
        Line(
            "subscription create shop/orders billing --mode shared --from earliest "
            "--deliveries-max 1 --on-spent dead-letter"
        ),
        Line("subscription create shop/orders billing --mode exclusive"),
        Line("subscription create shop/none billing"),
        Line("subscription list shop/orders"),
        Line("subscription list --json"),
        Line("subscription show shop/orders billing"),
        Line("subscription show shop/orders none"),
        Line("subscription peek shop/orders billing --count 2 --format json"),
        Line("subscription consume shop/orders billing --count 3"),
        Line("subscription consume shop/orders billing --count 2 --nack --error broken --format json"),
        Line("subscription show shop/orders billing --json"),
        Line("subscription alter shop/orders billing --ack-timeout-ms 60000 --deliveries-max none"),
        Line("subscription alter shop/orders billing --ack-timeout-ms 0"),
        Line("subscription alter shop/orders none --window 10"),
        Line("subscription pause shop/orders billing"),
        Line("subscription consume shop/orders billing"),
        Line("subscription resume shop/orders billing"),
        Line("deadletter list shop/orders billing"),
        Line("deadletter list shop/orders.billing.dead_letters --json --count 1"),
        Line("deadletter show shop/orders billing --letter 0:1"),
        Line("deadletter show shop/orders billing --letter 0:9"),
        Line("deadletter replay shop/orders billing --letter 0:0"),
        Line("deadletter replay shop/orders billing"),
        Line("deadletter purge shop/orders billing --all --yes"),
        Line("deadletter list shop/orders billing"),
        Line("subscription seek shop/orders billing --to 700"),
        Line("subscription seek shop/orders billing --to earliest --json"),
        Line("subscription consume shop/orders billing --count 1"),
        Line("subscription delete shop/orders billing"),
        Line("subscription delete shop/orders billing --yes"),
        Line("subscription list"),
    ),
    "routers": (
        *MADE,
        Line("topic create shop/eu"),
        Line("router list"),
        Line("router create eu shop/orders --to shop/eu --tag eu --header kind --set-header via=eu"),
        Line("router create eu shop/orders --to shop/eu"),
        Line("router create back shop/eu --to shop/orders"),
        Line("router create r shop/none --to shop/eu"),
        Line("router create r shop/orders --to shop/eu --from 17"),
        Line("router create r/s shop/orders --to shop/eu"),
        Line("router pause eu"),
        Line("router alter eu --key-prefix k --remove-header raw --key tag --json"),
        Line("router list"),
        Line("router list --json"),
        Line("router status eu"),
        Line("router status eu --json"),
        Line("router resume eu"),
        Line("router pause none"),
        Line("router delete eu"),
        Line("router delete eu --yes"),
        Line("router status eu"),
    ),
}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable names a place, and a broker in this process has the time of a busy machine and audits nothing."""
    monkeypatch.setattr(logging.getLogger("forebay.audit"), "disabled", True)
    for name in (DIRECTORY_VARIABLE, URL_VARIABLE, brokers.TOKEN_VARIABLE, brokers.AUTHORITY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(brokers, "REACH_SECONDS", 30.0)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No broker answers, and that is soon known."""
    monkeypatch.setattr(brokers, "REACH_SECONDS", 0.2)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with running_broker(tmp_path / "served") as broker:
        yield broker.url


def _by_url(url: str, *words: str, stdin: bytes = b"") -> Outcome:
    result = invoke([*words, "--url", url], stdin=stdin)
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_bytes_are_added_up_by_the_broker_as_by_the_command(tmp_path: Path) -> None:
    with running_broker(tmp_path / "served") as broker:
        for words in ("topic create shop/orders", "topic create shop/carts --engine rocksdb", "topic create shop/none"):
            _by_url(broker.url, *words.split())
        _by_url(broker.url, "produce", "shop/orders", "--format", "json", stdin=ORDERS)
        _by_url(broker.url, "topic", "seal", "shop/orders")
        lines = [(), ("shop/orders",), ("shop/none", "--json"), ("--json",), ("shop/absent",), ("shop/carts",)]
        shell = Shell(tmp_path / "served")

        def are_equal() -> bool:
            asked = [_by_url(broker.url, "du", *words) for words in lines]
            beside = [shell.run("du", *words) for words in lines]
            assert [one.code for one in asked] == [one.code for one in beside] == [0, 0, 0, 0, 2, 0]
            assert "shop/orders" in asked[0].out and one_line(asked[4].err)
            assert asked[5].out.split()[4:6] == beside[5].out.split()[4:6] == ["(rocksdb)", "database"]
            return [one.out for one in asked[:4]] == [one.out for one in beside[:4]]

        # RocksDB writes a few bytes of its own at times, also between the two looks.
        until(are_equal)


@pytest.mark.slow
def test_shards_are_listed_by_the_broker_as_by_the_command(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "served")
    with running_broker(shell.directory) as broker:
        for words in (
            "topic create shop/orders --partitions 2 --durability fsync",
            "topic create shop/sealed",
            "topic create shop/new",
        ):
            _by_url(broker.url, *words.split())
        _by_url(broker.url, "produce", "shop/orders", "--partition", "1", "--format", "json", stdin=ORDERS)
        _by_url(broker.url, "topic", "seal", "shop/sealed")
        lines = ["list", "list --json", "list shop/orders", "list shop/absent", "status shop/orders"]
        lines += ["status shop/sealed", "status shop/orders --partition 1 --json", "status shop/orders --partition 7"]
        lines += ["status shop/absent"]
        asked = [_by_url(broker.url, "shard", *line.split()) for line in lines]
        beside = [shell.run("shard", *line.split()) for line in lines]

    for line, one, other in zip(lines, asked, beside, strict=True):
        assert one == other, line
    assert [one.code for one in asked] == [0, 0, 0, 2, 0, 0, 0, 2, 2]
    listed = {(item["topic"], item["partition"]): item for item in asked[1].items}
    assert (listed["shop/orders", 1]["phase"], listed["shop/orders", 1]["here"]) == ("open", True)
    assert (listed["shop/sealed", 0]["phase"], listed["shop/sealed", 0]["next"]) == ("sealed", 0)
    assert asked[6].items[0]["offsets"]["next"] == 20
    assert "20 offsets behind" in asked[4].out and "sealed" in asked[5].out


@pytest.mark.slow
def test_a_key_is_erased_by_url(url: str) -> None:
    _by_url(url, "topic", "create", "shop/orders")
    _by_url(url, "produce", "shop/orders", "--format", "json", stdin=ORDERS)
    _by_url(url, "topic", "export", "shop/orders")
    _by_url(url, "produce", "shop/orders", "--format", "json", stdin=ORDERS)

    erased = _by_url(url, "records", "erase", "shop/orders", "--key", "k1", "--yes", "--json")
    again = _by_url(url, "records", "erase", "shop/orders", "--key", "k1", "--yes")

    item = erased.items[0]
    assert (erased.code, item["deleted"]) == (0, 14)
    assert {place["tier"] for place in item["remains"]} == {"sealed", "log"}
    assert all(place["bytes"] > 0 and place["until"] == "compaction" for place in item["remains"])
    assert all(place["place"].startswith("shards/") for place in item["remains"])
    assert again.out.startswith("shop/orders: 0 records deleted, no reader sees them again\n")
    assert again.out.count("their bytes remain in shards/") == len(item["remains"])
    (line,) = item["commands"]
    rewritten = _by_url(url, *shlex.split(line)[1:])
    assert (rewritten.code, rewritten.out) == (0, "shop/orders: 0 records deleted, no reader sees them again\n")
    assert _by_url(url, "records", "get", "shop/orders", "--key", "k1").code == 1


@pytest.mark.slow
def test_a_topic_that_another_directory_has_is_not_taken_over(tmp_path: Path) -> None:
    shared = {
        "storage": {"mode": "shared_fs"},
        "store": {"root": str(tmp_path / "store")},
        "metadata": {"path": str(tmp_path / "shared.sqlite")},
    }
    with forebay.open(tmp_path / "other", shared) as other:
        other.create_topic("shop/orders").append(b"theirs")
        settings = Settings.load(None, {"server": {"port": 0}, **shared}, environment={})
        with running_broker(tmp_path / "served", settings) as broker:
            verbs = [_by_url(broker.url, "topic", verb, "shop/orders") for verb in ("seal", "export", "unseal")]
            listed = _by_url(broker.url, "shard", "list", "--json")

        assert [(one.code, one_line(one.err), one.out) for one in verbs] == [(4, True, "")] * 3
        assert other.directory_id is not None
        assert all(other.directory_id in one.err for one in verbs)
        assert [(item["here"], item["holder"]) for item in listed.items] == [(False, other.directory_id)]
        assert other.topic("shop/orders").append(b"still") == 1


@pytest.mark.usefixtures("absent")
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_broker_and_a_directory_are_not_named_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell(tmp_path / "log")
    shell.ok("topic", "create", "shop/orders")

    both = shell.run("topic", "list", "--url", "http://127.0.0.1:1")
    before = invoke(["--url", "http://127.0.0.1:1", "topic", "list", "--data", "data"])
    monkeypatch.setenv(URL_VARIABLE, "http://127.0.0.1:1")
    directory = shell.run("topic", "list")
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(shell.directory))
    neither = invoke(["topic", "list"])

    assert both.code == before.exit_code == neither.exit_code == 2
    assert "--url" in both.err and "--data" in both.err and one_line(both.err)
    assert URL_VARIABLE in neither.stderr and DIRECTORY_VARIABLE in neither.stderr
    assert directory.code == 0 and "shop/orders" in directory.out


def test_the_environment_names_a_broker(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL_VARIABLE, url)

    result = invoke(["topic", "create", "shop/orders"])

    assert result.exit_code == 0
    assert "shop/orders" in _by_url(url, "topic", "list").out


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted({" ".join(path) for path, _ in COMMANDS} - BY_URL - PIPELINES - {"conformance", "top"})
)
def test_a_command_that_needs_the_files_refuses(path: str) -> None:
    words = {**WORDS, **ON_SPARK, "topic move": "shop/orders --to other", "serve": "", "router run": ""}[path]

    outcome = _by_url("http://127.0.0.1:1", *path.split(), *words.split())

    assert outcome.code == 2
    assert one_line(outcome.err) and "--data DIR" in outcome.err


def test_the_help_of_a_command_offers_a_broker_if_it_can_ask_one() -> None:
    """It is understood everywhere, so that what it names is refused with what to do."""
    offering = {
        " ".join(path)
        for path, command in COMMANDS
        for option in command.params
        if "--url" in option.opts and not option.hidden
    }

    assert offering == BY_URL | PIPELINES | {"conformance", "top"}


def test_a_job_by_url_takes_no_settings_file(tmp_path: Path) -> None:
    (tmp_path / "local.yaml").write_text("wal: {free_bytes_min: 0}\n")

    outcome = _by_url("http://127.0.0.1:1", "history", "profile", "--settings", str(tmp_path / "local.yaml"))
    compacted = _by_url("http://127.0.0.1:1", "history", "compact", "--settings", str(tmp_path / "local.yaml"))

    assert outcome.code == compacted.code == 2
    assert one_line(outcome.err) and "--set table.warehouse=lake" in outcome.err
    assert one_line(compacted.err) and "--data DIR" in compacted.err


@pytest.mark.usefixtures("absent")
@pytest.mark.parametrize("path", sorted(PIPELINES))
def test_a_pipeline_asks_the_broker_that_is_named_and_not_its_own_location(path: str, tmp_path: Path) -> None:
    source = "sources: [{name: orders, topic: shop/orders, format: raw}]\n"
    sink = "sinks: [{name: out, from: orders, topic: shop/copies}]\n"
    location = f"location: {{path: {tmp_path / 'data'}}}\n"
    (tmp_path / "p.yml").write_text(f"name: copied\nmode: batch\n{location}{source}{sink}")

    outcome = _by_url("http://127.0.0.1:1", *path.split(), str(tmp_path / "p.yml"))

    assert (outcome.code, outcome.out) == (4, "")
    assert "http://127.0.0.1:1" in outcome.err


@pytest.mark.slow
@pytest.mark.usefixtures("absent")
@pytest.mark.parametrize("path", sorted(BY_URL))
def test_no_command_takes_the_files_where_a_broker_is_named(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.txt").write_text("one\n")

    outcome = _by_url("http://127.0.0.1:1", *path.split(), *{**WORDS, **ON_SPARK}[path].split())

    assert (outcome.code, outcome.out) == (4, "")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "more.txt"]
