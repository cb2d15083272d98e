"""`forebay shard take-over`: an operator gives up what a directory that will not come back has not exported."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from tests.cli.environment import TOPIC, CommandEnvironment
from tests.cli.rig import one_line

pytestmark = pytest.mark.slow


@pytest.fixture
def environment(tmp_path: Path) -> CommandEnvironment:
    """Directory `a` has a topic of two partitions, and ten records in one of them that are not history."""
    found = CommandEnvironment(tmp_path, export={"at_close_seconds_max": 0, "interval_s": 600})
    found.ok("a", "topic", "create", TOPIC, "--partitions", "2")
    found.produce("a", 0, 10)
    found.ok("b", "topic", "create", "shop/other")
    return found


def test_a_loss_must_be_accepted_and_is_shown(environment: CommandEnvironment) -> None:
    refused = environment.run("b", "produce", TOPIC, stdin=b"10\n")
    assert refused.code != 0
    assert "[0, 10)" in refused.err and f"forebay shard take-over {TOPIC}[0] --accept-loss" in refused.err
    without = environment.run("b", "shard", "take-over", f"{TOPIC}[0]").err
    assert one_line(without) and "--accept-loss" in without
    assert environment.shown("b")["shards"][0]["losses"] == []

    taken = environment.ok("b", "shard", "take-over", f"{TOPIC}[0]", "--accept-loss", "--json").items
    shown = environment.shown("b")["shards"]

    [loss] = taken[0]["losses"]
    assert shown[0]["losses"] == [loss] and shown[1]["losses"] == []
    assert (loss["start"], loss["stop"]) == (0, 10) and loss["by"].startswith(f"{getpass.getuser()}@")
    assert "given up     offsets [0, 10) of directory" in environment.ok("b", "topic", "show", TOPIC).out
    environment.produce("b", 10, 12)
    # The old directory comes back: what it had is brought back by name.
    environment.ok("b", "shard", "salvage", TOPIC, "--from", str(environment.root / "a"), "--append")
    assert environment.ok("b", "topic", "show", TOPIC, "--json").items[0]["shards"][0]["offsets"]["next"] == 22


def test_a_topic_alone_means_all_of_its_partitions(environment: CommandEnvironment) -> None:
    taken = environment.ok("b", "shard", "take-over", TOPIC, "--accept-loss", "--json").items

    assert [(item["partition"], len(item["losses"])) for item in taken] == [(0, 1), (1, 0)]


@pytest.mark.parametrize("shard", [f"{TOPIC}[x]", f"{TOPIC}[0", f"{TOPIC}[2]", "shop/nothing[0]"])
def test_a_partition_that_is_not_there_is_refused(environment: CommandEnvironment, shard: str) -> None:
    assert environment.run("b", "shard", "take-over", shard, "--accept-loss").code != 0


def test_the_policy_is_set_changed_and_shown(environment: CommandEnvironment) -> None:
    environment.ok("b", "topic", "create", "shop/quick", "--on-owner-loss", "take-over")
    assert environment.shown("b", "shop/quick")["on_owner_loss"] == "take_over"
    assert environment.shown("b")["on_owner_loss"] == "wait"

    environment.ok("b", "topic", "alter", TOPIC, "--on-owner-loss", "take-over")

    assert "taken over when its owner is gone" in environment.ok("b", "topic", "show", TOPIC).out
    environment.produce("b", 10, 11)
    environment.ok("b", "topic", "copy", "shop/quick", "shop/copy")
    assert environment.shown("b", "shop/copy")["on_owner_loss"] == "take_over"
