"""`forebay records` and `forebay du`: find, delete, erase, and what is left of it on disk."""

from __future__ import annotations

import base64
import shlex
from pathlib import Path

import pytest

import forebay
from tests.cli.rig import Shell, one_line, snapshot
from tests.support.erased import holders

pytestmark = pytest.mark.slow

ENGINES = ["rocksdb", "segment"]
TOPIC = "shop/orders"


def furnished(directory: Path, engine: str, partitions: int = 2) -> Shell:
    """Twelve records with keys `0` to `3`, tags `a` and `b`, a second apart."""
    with forebay.open(str(directory)) as log:
        topic = log.create_topic(TOPIC, engine=engine, partitions=partitions)
        for number in range(12):
            tag = "ab"[number % 2]
            topic.append(b"%d" % number, key=b"%d" % (number % 4), tag=tag, timestamp=number * 1000)
    return Shell(directory)


@pytest.fixture(params=ENGINES)
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Shell:
    return furnished(tmp_path / "log", request.param)


def test_get_by_key_gives_the_newest_or_all(shell: Shell) -> None:
    assert shell.ok("records", "get", TOPIC, "--key", "1").out == "9\n"
    assert shell.ok("records", "get", TOPIC, "--key-b64", "MQ==").out == "9\n"
    assert shell.ok("records", "get", TOPIC, "--key", "1", "--history").out == "1\n5\n9\n"
    assert shell.ok("records", "get", TOPIC, "--key", "1", "--history", "--count", "2").out == "1\n5\n"
    item = shell.ok("records", "get", TOPIC, "--key", "1", "--format", "json").items[0]
    assert (item["topic"], item["key"], item["value"], item["tag"]) == (TOPIC, "1", "9", "b")


def test_get_by_tag_and_by_time(shell: Shell) -> None:
    tagged = shell.ok("records", "get", TOPIC, "--tag", "a").out.split()
    assert sorted(tagged, key=int) == ["0", "2", "4", "6", "8", "10"]
    timed = [
        shell.ok("records", "get", TOPIC, "--at-time", time, "--format", "json").items
        for time in ("4500ms", "1970-01-01T00:00:04.500Z")
    ]
    assert timed[0] == timed[1]
    first = {item["partition"]: int(item["value"]) for item in timed[0]}
    with forebay.open(str(shell.directory)) as log:
        for number, value in first.items():
            assert value == min(
                int(r.value or b"") for r in log.topic(TOPIC).read(partition=number) if r.timestamp >= 4500
            )


def test_get_works_while_another_process_owns_the_directory_if_the_engine_lets_it(shell: Shell) -> None:
    with forebay.open(str(shell.directory)) as log:
        topic = log.topic(TOPIC)
        topic.append(b"new", key=b"1", tag="c", timestamp=20_000)
        for words in (["--key", "1"], ["--tag", "c"], ["--at-time", "20000ms"]):
            found = shell.run("records", "get", TOPIC, *words)
            if topic.spec.engine == "rocksdb":
                assert (found.code, found.out) == (4, "")
            else:
                assert (found.code, found.out) == (0, "new\n")
        refused = shell.run("records", "delete", TOPIC, "--key", "1", "--yes")
        assert refused.code == 4


def test_get_says_by_its_code_that_there_is_none(shell: Shell) -> None:
    for words in (["--key", "x"], ["--tag", "c"], ["--at-time", "13000ms"], ["--key", "1", "--partition", "0"]):
        found = shell.run("records", "get", TOPIC, *words)
        if found.code == 0:
            assert words[-1] == "0"
            found = shell.run("records", "get", TOPIC, *words[:-1], "1")
        assert (found.code, found.out, found.err) == (1, "", "")


def test_delete_by_everything_is_counted_and_silent(shell: Shell) -> None:
    def deleted(*words: str) -> int:
        return int(shell.ok("records", "delete", TOPIC, *words, "--yes", "--json").items[0]["deleted"])

    assert deleted("--key", "1") == 3
    assert deleted("--key", "1") == 0
    assert deleted("--tag", "a") == 6
    left = shell.ok("consume", TOPIC, "--format", "json")
    assert sorted(item["value"] for item in left.items) == ["11", "3", "7"] and "gap" not in left.out + left.err
    place = left.items[0]["partition"]
    assert (
        deleted("--partition", str(place), "--offsets", f"{left.items[0]['offset']}-{left.items[0]['offset'] + 1}") == 1
    )
    assert deleted("--partition", str(place), "--before", "1000") == 2
    assert shell.ok("consume", TOPIC).out == ""
    assert "0 records deleted" in shell.ok("records", "delete", TOPIC, "--tag", "a", "--yes").out


def test_erase_says_where_bytes_remain(shell: Shell) -> None:
    erased = shell.ok("records", "erase", TOPIC, "--key", "2", "--yes", "--json").items[0]
    text = shell.ok("records", "erase", TOPIC, "--key", "3", "--yes").out
    again = shell.ok("records", "erase", TOPIC, "--key", "2", "--yes", "--json").items[0]

    assert erased["deleted"] == 3 and again == {**again, "topic": TOPIC, "deleted": 0, "copies": []}
    assert {place["place"] for place in again["remains"]} == {place["place"] for place in erased["remains"]} != set()
    assert all(Path(place["place"]).exists() for place in erased["remains"])
    assert "3 records deleted" in text and "remain in" in text and "until" in text
    assert "to remove them, run" in text and f"forebay records erase {TOPIC} --key 3 --now --yes" in text
    assert shell.run("records", "get", TOPIC, "--key", "2").code == 1


def test_the_commands_that_erase_names_remove_the_bytes(shell: Shell) -> None:
    secret = b"rue de la Paix 17"
    with forebay.open(str(shell.directory)) as log:
        log.topic(TOPIC).append(secret, key=b"anna@example.net")
        log.topic(TOPIC).append(b"kept", key=b"bob")
    shell.run("topic", "export", TOPIC)
    asked = [shell.ok("records", "erase", TOPIC, "--key", "anna@example.net", "--yes", "--json").items[0]]
    assert holders(secret, shell.directory)

    while asked[-1]["commands"]:
        assert len(asked) < 5, asked[-1]
        for line in asked[-1]["commands"]:
            shell.run(*shlex.split(line)[1:])
        asked.append(shell.run(*shlex.split(asked[0]["commands"][-1])[1:], "--json").items[0])

    assert holders(secret, shell.directory) | holders(b"anna@example.net", shell.directory) == set()
    assert asked[-1]["remains"] == [] and shell.ok("records", "get", TOPIC, "--key", "bob").out == "kept\n"


def test_a_key_that_is_no_text_is_named_in_base64(shell: Shell) -> None:
    for key in (b"\xff\x00", b"-x", b"a'b c"):
        with forebay.open(str(shell.directory)) as log:
            log.topic(TOPIC).append(b"v", key=key)
        coded = base64.b64encode(key).decode()
        (line,) = shell.ok("records", "erase", TOPIC, "--key-b64", coded, "--yes", "--json").items[0]["commands"]
        with forebay.open(str(shell.directory)) as log:
            log.topic(TOPIC).append(b"v", key=key)
        assert shell.run(*shlex.split(line)[1:], "--json").items[0]["deleted"] == 1


def test_erase_names_exactly_the_files_that_had_the_key(tmp_path: Path) -> None:
    with forebay.open(str(tmp_path / "log")) as log:
        topic = log.create_topic(TOPIC)
        for key in (b"a", b"b", b"a", b"c"):
            topic.append_many([b"v"] * 50, keys=[key] * 50)
            topic.rotate()
    shell = Shell(tmp_path / "log")
    files = [str(path) for path in shell.segments()]

    erased = shell.ok("records", "erase", TOPIC, "--key", "a", "--yes", "--json").items[0]

    assert erased["deleted"] == 100
    assert [place["place"] for place in erased["remains"]] == [files[0], files[2]]
    assert {(place["until"], place["partition"]) for place in erased["remains"]} == {("compaction", 0)}


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["get", TOPIC], "--key or --tag or --at-time"),
        (["get", TOPIC, "--key", "1", "--tag", "a"], "one alone"),
        (["get", TOPIC, "--key", "1", "--key-b64", "MQ=="], "both name a key"),
        (["get", TOPIC, "--key-b64", "!"], "not base64"),
        (["get", TOPIC, "--tag", "a", "--history"], "add --key"),
        (["get", TOPIC, "--tag", ""], "1 to 1024"),
        (["get", TOPIC, "--at-time", "100"], "give a time"),
        (["get", TOPIC, "--at-time", "noon"], "give a time"),
        (["get", TOPIC, "--key", "1", "--partition", "7"], "partition is 7"),
        (["get", TOPIC, "--key", "1", "--count", "-1"], "--count is -1"),
        (["get", "shop/none", "--key", "1"], "no topic shop/none"),
        (["delete", TOPIC, "--yes"], "--key or --tag or --offsets or --before"),
        (["delete", TOPIC, "--key", "1"], "add --yes"),
        (["delete", TOPIC, "--before", "3", "--yes"], "name the partition"),
        (["delete", TOPIC, "--offsets", "3", "--partition", "0", "--yes"], "give A-B"),
        (["delete", TOPIC, "--offsets", "9-3", "--partition", "0", "--yes"], "ends before it begins"),
        (["delete", TOPIC, "--before", "-3", "--partition", "0", "--yes"], "offset is -3"),
        (["delete", TOPIC, "--key", "1", "--partition", "9", "--yes"], "partition is 9"),
        (["erase", TOPIC, "--yes"], "give --key"),
        (["erase", TOPIC, "--key", "1"], "add --yes"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_and_nothing_deleted(tmp_path: Path, words: list[str], reported: str) -> None:
    shell = furnished(tmp_path / "log", "rocksdb")
    refused = shell.run("records", *words)
    assert refused.code == 2 and one_line(refused.err) and reported in refused.err, refused.err
    assert len(shell.ok("consume", TOPIC).out.split()) == 12


def test_du_counts_topics_by_tier_and_changes_nothing(tmp_path: Path) -> None:
    shell = furnished(tmp_path / "log", "rocksdb")
    with forebay.open(str(shell.directory)) as log:
        topic = log.create_topic("files", partitions=2)
        for partition in (0, 1):
            topic.append_many([b"x" * 1000] * 100, partition=partition)
        log.create_topic("fleeting", engine="memory")
    shell.ok("topic", "export", "files")
    before = snapshot(shell.directory)

    items = shell.ok("du", "--json").items
    text = shell.ok("du").out

    sizes = {(item["topic"], item["tier"]): item["bytes"] for item in items}
    on_disk = sum(len(content) for name, content in before.items() if name.startswith("shards/"))
    assert sizes["default/files", "sealed"] > 200_000
    assert sum(size for (name, _), size in sizes.items() if name == "default/files") == on_disk
    database = sum(len(content) for name, content in before.items() if name.startswith("rocksdb/"))
    assert sizes[None, "database"] == database
    assert all(item["files"] > 0 for item in items)
    assert "total" in text and "default/files" in text
    assert {item["topic"] for item in shell.ok("du", "files", "--json").items} == {"default/files"}
    refused = shell.run("du", "none")
    assert refused.code == 2 and one_line(refused.err)
    assert snapshot(shell.directory) == before


def test_du_counts_objects_in_the_store(tmp_path: Path) -> None:
    settings = tmp_path / "shared.yaml"
    settings.write_text(f"storage: {{mode: shared_fs}}\nstore: {{root: {tmp_path}/store}}\n")
    shell = Shell(tmp_path / "log")
    shell.ok("topic", "create", "t", "--settings", str(settings))
    shell.ok("produce", "t", "--settings", str(settings), stdin=b"x\n" * 100)
    shell.ok("topic", "export", "t", "--settings", str(settings))

    items = shell.ok("du", "--json", "--settings", str(settings)).items

    objects = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*.seg"))
    history = next(item for item in items if item["tier"] == "history")
    assert history["topic"] == "default/t" and history["bytes"] >= objects > 0
