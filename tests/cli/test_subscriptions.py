"""`forebay subscription` and `forebay deadletter`, from the first record to the last dead letter."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import forebay
from forebay.topics import TopicSpec
from tests.cli.rig import Shell, one_line
from tests.subscriptions.test_vouching import FORGED
from tests.support.processes import hear

pytestmark = pytest.mark.slow


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    with forebay.open(str(tmp_path / "log")) as log:
        log.create_topic("shop/orders").append_many([b"%d" % number for number in range(4)])
        log.create_topic("shop/repaired")
    return Shell(tmp_path / "log")


def lag(shell: Shell, name: str) -> int:
    (shown,) = shell.ok("subscription", "show", "shop/orders", name, "--json").items
    return int(shown["partitions"][0]["lag"])


def test_a_subscription_from_its_creation_to_its_end(shell: Shell) -> None:
    made = shell.ok("subscription", "create", "shop/orders", "billing", "--mode", "key-shared", "--from", "earliest")
    assert made.out == "shop/orders has the subscription billing, key_shared\n"
    assert "billing" in shell.ok("subscription", "list").out
    assert [item["mode"] for item in shell.ok("subscription", "list", "shop/orders", "--json").items] == ["key_shared"]
    assert shell.ok("subscription", "peek", "shop/orders", "billing", "--count", "2").out == "0\n1\n"

    assert shell.ok("subscription", "consume", "shop/orders", "billing", "--count", "3").out == "0\n1\n2\n"
    assert lag(shell, "billing") == 1
    shell.ok("subscription", "seek", "shop/orders", "billing", "--to", "2")
    shell.ok("subscription", "pause", "shop/orders", "billing")
    assert shell.ok("subscription", "consume", "shop/orders", "billing").out == ""
    assert "paused" in shell.ok("subscription", "show", "shop/orders", "billing").out
    shell.ok("subscription", "resume", "shop/orders", "billing")
    assert shell.ok("subscription", "consume", "shop/orders", "billing").out == "2\n3\n"
    shell.ok("subscription", "delete", "shop/orders", "billing", "--yes")

    assert shell.ok("subscription", "list").out == ""


def test_what_is_consumed_until_an_interrupt_has_records_alone_in_it(shell: Shell, tmp_path: Path) -> None:
    shell.ok("subscription", "create", "shop/orders", "billing", "--from", "earliest")
    words = ["subscription", "consume", "shop/orders", "billing", "--follow", "--format", "json"]
    command = [sys.executable, "-m", "forebay.cli", "--data", str(tmp_path / "log"), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        heard = [json.loads(hear(child))["value"] for _ in range(4)]
        child.send_signal(signal.SIGINT)
        rest, said = child.communicate(timeout=240)

    assert (heard, rest, said) == (["0", "1", "2", "3"], "", "forebay: stopped\n")
    assert child.returncode == 0


def test_dead_letters_are_listed_shown_replayed_and_purged(shell: Shell) -> None:
    words = ["--from", "earliest", "--deliveries-max", "1", "--on-spent", "dead-letter"]
    shell.ok("subscription", "create", "shop/orders", "mails", *words)
    assert (
        shell.ok("subscription", "consume", "shop/orders", "mails", "--nack", "--error", "bounced").out
        == "0\n1\n2\n3\n"
    )

    listed = shell.ok("deadletter", "list", "shop/orders", "mails").out
    assert "0:0" in listed and "shop/orders[0]@3" in listed and "bounced" in listed
    dead = "shop/orders.mails.dead_letters"
    items = shell.ok("deadletter", "list", dead, "--json").items
    assert [(item["letter"], item["record"]["value"], item["reason"]) for item in items][:2] == [
        ("0:0", "0", "nack"),
        ("0:1", "1", "nack"),
    ]
    assert "bounced" in shell.ok("deadletter", "show", "shop/orders", "mails", "--letter", "0:1").out
    assert (
        shell.ok("deadletter", "replay", "shop/orders", "mails", "--letter", "0:1").out
        == f"{dead}: 1 dead letters replayed\n"
    )
    assert shell.ok("consume", "shop/orders", "--from", "4", "--partition", "0").out == "1\n"
    moved = shell.ok(
        "deadletter", "replay", dead, "--letter", "0:0", "--letter", "0:1", "--to", "shop/repaired", "--json"
    )
    assert moved.items == [{"topic": dead, "replayed": 1}]
    assert shell.ok("consume", "shop/repaired").out == "0\n"
    assert (
        shell.ok("deadletter", "purge", "shop/orders", "mails", "--all", "--yes").out
        == f"{dead}: 2 dead letters purged\n"
    )
    assert shell.ok("deadletter", "list", "shop/orders", "mails").out == ""


def test_records_that_only_look_like_dead_letters_stay_until_their_origin_is_named(
    shell: Shell, tmp_path: Path
) -> None:
    with forebay.open(str(tmp_path / "log")) as log:
        log.create_topic("failed").append(b"forged", headers=FORGED)
        log.create_topic("payments/ledger")

    assert shell.ok("deadletter", "list", "failed").out.splitlines()[1].split()[-1] == "no"
    assert [item["is_vouched"] for item in shell.ok("deadletter", "list", "failed", "--json").items] == [False]
    passed_over = shell.ok("deadletter", "replay", "failed", "--all")
    assert passed_over.out == "default/failed: 0 dead letters replayed\n"
    assert "say that they are dead letters of payments/ledger, and nothing vouches for that" in passed_over.err
    assert "--origin payments/ledger" in passed_over.err
    assert shell.ok("consume", "payments/ledger").out == ""

    named = shell.ok("deadletter", "replay", "failed", "--all", "--origin", "payments/ledger")
    assert named.out == "default/failed: 1 dead letters replayed\n"
    assert shell.ok("consume", "payments/ledger").out == "forged\n"


def test_how_a_subscription_delivers_is_altered(shell: Shell) -> None:
    shell.ok("subscription", "create", "shop/orders", "s", "--deliveries-max", "2")

    words = ["--window", "7", "--deliveries-max", "none", "--ack-timeout-ms", "5", "--backoff-min-ms", "0", "--json"]
    (item,) = shell.ok("subscription", "alter", "shop/orders", "s", *words).items
    assert (item["window_records_max"], item["deliveries_max"], item["ack_timeout_ms"]) == (7, None, 5)

    said = shell.ok(
        "subscription", "alter", "shop/orders", "s", "--deliveries-max", "3", "--on-spent", "dead-letter"
    ).out
    assert said.startswith("s: deliveries 3, then dead_letter to shop/orders.s.dead_letters; ack time-out 5 ms, ")
    shell.ok("subscription", "alter", "shop/orders", "s", "--dead-letter-topic", "shop/repaired")
    (shown,) = shell.ok("subscription", "show", "shop/orders", "s", "--json").items
    assert (shown["dead_letter_topic"], shown["backoff_min_ms"]) == ("shop/repaired", 0)


def test_a_list_of_dead_letters_says_that_there_are_more(shell: Shell) -> None:
    words = ["--from", "earliest", "--deliveries-max", "1", "--on-spent", "dead-letter"]
    shell.ok("subscription", "create", "shop/orders", "mails", *words)
    shell.ok("subscription", "consume", "shop/orders", "mails", "--nack")

    some = shell.ok("deadletter", "list", "shop/orders", "mails", "--count", "3", "--json")
    every = shell.ok("deadletter", "list", "shop/orders", "mails", "--count", "4", "--json")

    assert (len(some.items), len(every.items)) == (3, 4)
    assert "more dead letters than these 3: raise --count" in some.err
    assert every.err == ""


def test_a_topic_that_is_deleted_meanwhile_is_not_listed(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.ok("subscription", "create", "shop/orders", "billing")
    shell.ok("subscription", "create", "shop/repaired", "fixes")
    topics = forebay.Storage.topics

    def raced(log: forebay.Storage) -> list[TopicSpec]:
        found = topics(log)
        if log.read_only:
            with forebay.open(shell.directory) as owner:
                owner.delete_topic("shop/orders")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(forebay.Storage, "topics", raced)
        listed = shell.ok("subscription", "list", "--json")

    assert [item["name"] for item in listed.items] == ["fixes"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["subscription", "alter", "shop/orders", "s"], "nothing is to be changed"),
        (["subscription", "alter", "shop/orders", "s", "--deliveries-max", "few"], "or none for any number"),
        (["subscription", "show", "shop/orders", "none"], "no subscription none"),
        (["subscription", "create", "shop/orders", "s", "--mode", "both"], "cannot be so"),
        (["subscription", "consume", "shop/orders", "s", "--error", "x"], "add --nack"),
        (["subscription", "peek", "shop/orders", "s", "--count", "0"], "give 1 or more"),
        (["deadletter", "replay", "shop/orders"], "--letter PARTITION:OFFSET, or --all"),
        (["deadletter", "replay", "shop/orders", "--all", "--letter", "0:1"], "or --all"),
        (["deadletter", "show", "shop/orders", "--letter", "17"], "as 0:17"),
        (["deadletter", "list", "shop/orders", "none"], "no subscription none"),
    ],
)
def test_what_is_wrong_is_one_line(shell: Shell, words: list[str], said: str) -> None:
    result = shell.run(*words)

    assert result.code == 2
    assert one_line(result.err) and said in result.err


def test_the_dispatch_of_a_topic_is_chosen_shown_and_altered(shell: Shell) -> None:
    shell.ok("topic", "create", "ticker", "--dispatch", "non-reliable")
    assert "at most once" in shell.ok("topic", "show", "ticker").out
    shell.ok("subscription", "create", "ticker", "screen")

    refused = shell.run("topic", "alter", "ticker", "--dispatch", "reliable")
    assert refused.code == 3 and one_line(refused.err) and "screen" in refused.err

    shell.ok("subscription", "delete", "ticker", "screen", "--yes")
    (item,) = shell.ok("topic", "alter", "ticker", "--dispatch", "reliable", "--json").items
    assert item["dispatch"] == "reliable"
