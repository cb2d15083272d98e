"""`forebay dump`: every kind of file, whole and not."""

from __future__ import annotations

from pathlib import Path

import forebay
from tests.cli.rig import Shell, changed, filled, flip, one_line, snapshot


def _kinds(shell: Shell, *words: str) -> list[str]:
    return [item["kind"] for item in shell.ok("dump", *words, "--json").items]


def test_a_segment_frame_by_frame(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    with forebay.open(str(directory)) as log:
        topic = log.create_topic("t", durability="fsync")
        topic.append(b"v", key=b"k", tag="eu", headers={"a": b"\xff"}, timestamp=7, producer=5, sequence=0)
    shell = Shell(directory)
    segment = str(shell.segments()[0])

    items = shell.ok("dump", segment, "--records", "--json").items
    text = shell.ok("dump", segment).out

    assert [item["kind"] for item in items] == ["segment", "state", "data", "record", "mark"]
    assert items[2]["runs"] == [{"count": 1, "producer": 5, "sequence": 0}]
    assert items[2]["columns"] == ["keys", "tags", "headers"]
    assert items[3]["value"] == "v" and items[3]["headers"] == {"a": {"b64": "/w=="}}
    assert items[4]["clean"] is True
    assert text.splitlines()[0].startswith("segment ") and "clean=yes" in text


def test_damage_is_shown_with_its_byte_and_where_frames_go_on(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    with forebay.open(str(directory)) as log:
        topic = log.create_topic("t", durability="fsync")
        for _ in range(3):
            topic.append(b"v")
    shell = Shell(directory)
    segment = shell.segments()[0]
    second = [item for item in shell.ok("dump", str(segment), "--json").items if item["kind"] == "data"][1]
    flip(segment, second["byte"] + 40)

    items = shell.ok("dump", str(segment), "--json").items

    (gap,) = [item for item in items if item["kind"] == "not whole"]
    assert (gap["byte"], gap["verdict"], gap["resumes_at_offset"]) == (second["byte"], "damaged", 2)
    assert sum(item["kind"] == "data" for item in items) == 2


def test_a_gap_and_a_torn_tail_are_shown(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log", rotations=0)
    changed(shell.segments()[0], lambda content: content + b"\x01" * 20)

    assert _kinds(shell, str(shell.segments()[0]))[-1] == "not whole"


def test_index_checkpoint_live_and_marker(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log", rotations=2, records=20)
    shard = shell.shards()[0]

    assert _kinds(shell, str(min(shard.glob("*.idx")))) == ["index", "entry"]
    assert _kinds(shell, str(shard / "checkpoint")) == ["checkpoint", "file", "file"]
    assert _kinds(shell, str(shard / "live")) == ["live"]
    assert shell.ok("dump", str(shell.directory / "forebay.json"), "--json").items[0]["format"] == 1


def test_metadata_values(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")

    everything = shell.ok("dump", "--json").items
    topics = shell.ok("dump", "--key", "/forebay/topics/", "--json").items

    assert {item["kind"] for item in everything} == {"metadata"}
    assert [item["key"] for item in topics] == ["/forebay/topics/shop/orders"]
    assert topics[0]["value"]["data"]["topic"] == "orders"


def test_metadata_of_other_installations_is_not_shown(tmp_path: Path) -> None:
    """Two installations keep their metadata in one store, under prefixes of which one begins as the other."""
    for prefix in ("/shop", "/shop2"):
        place = {"path": str(tmp_path / "shared.sqlite"), "prefix": prefix}
        with forebay.open(str(tmp_path / prefix[1:]), {"metadata": place}) as log:
            log.create_topic("orders")
    words = ("--json", "--set", f"metadata.path={tmp_path / 'shared.sqlite'}", "--set", "metadata.prefix=/shop")
    shell = Shell(tmp_path / "shop")

    everything = [item["key"] for item in shell.ok("dump", *words).items]
    beginning = [item["key"] for item in shell.ok("dump", "--key", "/shop", *words).items]
    topics = [item["key"] for item in shell.ok("dump", "--key", "/shop/to", *words).items]
    refused = shell.run("dump", "--key", "/shop2/topics/", *words)

    assert everything == beginning and all(key.startswith("/shop/") for key in everything)
    assert topics == ["/shop/topics/default/orders"] and topics[0] in everything
    assert refused.code == 2 and one_line(refused.err)
    assert '"/shop2/topics/" is outside of metadata.prefix' in refused.err and "/shop/" in refused.err


def test_what_is_not_whole_is_shown_and_not_hidden(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    shard = shell.shards()[0]
    for path in (min(shard.glob("*.idx")), shard / "checkpoint", shard / "live", min(shard.glob("*.seg"))):
        path.write_bytes(b"nonsense" * 20)

        item = shell.ok("dump", str(path), "--json").items[0]

        assert item["verdict"] == "damaged"


def test_several_files_are_distinguished(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    paths = [str(shell.shards()[0] / "checkpoint"), str(shell.shards()[0] / "live")]

    text = shell.ok("dump", *paths).out
    items = shell.ok("dump", *paths, "--json").items

    assert all(f"{path}:" in text for path in paths)
    assert {item["file"] for item in items} == set(paths)


def test_dumping_changes_nothing(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    before = snapshot(shell.directory)

    shell.ok("dump", *[str(path) for path in shell.segments()])
    shell.ok("dump")

    assert snapshot(shell.directory) == before


def test_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    (tmp_path / "holiday.jpg").write_bytes(b"jpg")

    for path in (tmp_path / "holiday.jpg", tmp_path / "absent.seg", shell.directory):
        refused = shell.run("dump", str(path))

        assert refused.code == 2 and one_line(refused.err)
