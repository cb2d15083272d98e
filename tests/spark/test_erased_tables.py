"""Erasing a key whose history an open table names: the table is named, and the commands of the answer clear it too."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.cli.rig import Shell
from tests.compacting.directly import compacted
from tests.spark.mixed import settings_file
from tests.storage.test_erasing import KEY, SECRET, TOPIC, filled, live, others
from tests.support.environments.directories import local
from tests.support.erased import holders

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("formats", [("iceberg",), ("delta",), ("iceberg", "delta")], ids=" ".join)
def test_a_table_that_names_erased_records_is_cleared_by_the_commands_of_the_answer(
    formats: tuple[str, ...], tmp_path: Path
) -> None:
    environment = local(tmp_path)
    with environment.open("one") as log:
        wanted = others(live(filled(log)))
        log.export_topic(TOPIC)
        compacted(environment)
        log.run_retention()
    shell, settings = Shell(tmp_path / "one"), ("--settings", settings_file(environment))
    for table_format in formats:
        shell.ok("table", "register", TOPIC, "--table-format", table_format, *settings)
    erasing = ("records", "erase", TOPIC, "--key", KEY.decode(), "--now", "--yes", "--json", *settings)

    first = shell.run(*erasing)

    assert first.code == 1, "bytes remain, and the table has them"
    assert all("of a table names it" in remnant["until"] for remnant in first.items[0]["remains"])
    commands = [command for line in first.items[0]["commands"] for command in line.split(" && ")]
    named = {"delta" if "--table-format delta" in command else "iceberg" for command in commands if "table" in command}
    assert named == set(formats)
    for command in commands:
        shell.ok(*shlex.split(command)[1:], *settings)
    last = shell.ok(*erasing)
    assert last.items[0]["remains"] == []
    assert holders(SECRET, tmp_path) | holders(KEY, tmp_path) == set()
    with environment.open("one") as log:
        assert live(log.topic(TOPIC)) == wanted
