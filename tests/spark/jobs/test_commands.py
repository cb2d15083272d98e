"""The jobs as commands: each runs, reports as lines and as JSON, and ends with the code that fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import forebay
from tests.cli.rig import Shell, flip, one_line
from tests.spark.topics import SETTINGS

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture
def shell(tmp_path: Path, spark: SparkSession) -> Shell:
    with forebay.open(str(tmp_path / "data"), SETTINGS) as log:
        topic = log.create_topic("shop/orders")
        topic.append_many([b'{"id": %d}' % number for number in range(100)], keys=[b"k"] * 100)
        log.seal_topic("shop/orders")
    return Shell(tmp_path / "data")


def test_every_job_runs_and_reports(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "more.json").write_text('{"id": 100}\n')
    (tmp_path / "new.yaml").write_text(f"storage: {{mode: shared_fs}}\nstore: {{root: {tmp_path / 'new'}}}\n")
    lake = ("table", "lake", "shop/orders", "--to", str(tmp_path / "lake"), "--schema", "id BIGINT NOT NULL")
    backfill = ("history", "backfill", "shop/orders", "--from", str(tmp_path / "more.json"), "--format", "json")

    planned = shell.ok(*lake, "--dry-run", "--json").items
    lines = [
        shell.ok(*words).out.splitlines()[-1]
        for words in (
            ("history", "scrub", "shop/orders", "--resume", str(tmp_path / "notes")),
            lake,
            (*backfill, "--column", "key='a'", "--option", "mode=FAILFAST"),
            ("history", "profile", "shop/orders", "--html", str(tmp_path / "page.html")),
            ("history", "reindex"),
            ("history", "migrate", "shop/orders", "--to", str(tmp_path / "new.yaml")),
        )
    ]

    assert [(item["job"], item["dry_run"], item["figures"]) for item in planned] == [("lake", True, {"offsets": 100})]
    for line, reported in zip(
        lines,
        (
            "scrub: 1 objects in 1 partitions: all sound",
            "lake: 100 offsets of shop/orders brought into",
            "backfill: 1 records brought into shop/orders by backfill files-",
            "profile: 101 records of 1 topics counted, page in",
            "reindex: 0 of 0 indexes made again",
            "migrate: 2 objects of 1 partitions copied, 0 were there, into directory",
        ),
        strict=True,
    ):
        assert line.startswith(reported), line
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_damage_has_its_code_and_errors_are_one_line(shell: Shell, tmp_path: Path) -> None:
    flip(min((shell.directory / "shards").rglob("*.seg")), -60)

    damaged = shell.run("history", "scrub", "--json")
    refused = shell.run("table", "lake", "shop/orders")
    unknown = shell.run("history", "profile", "shop/none")
    wrong = shell.run("history", "backfill", "shop/orders", "--from", "a", "--column", "nothing")

    assert damaged.code == 6 and json.loads(damaged.out)["findings"][0]["shard"] == "shop/orders[0]"
    assert [ended.code for ended in (refused, unknown, wrong)] == [2, 2, 2]
    assert all(one_line(ended.err) for ended in (refused, unknown, wrong)), unknown.err
