"""`forebay verify`: what it finds, where, and that it changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import forebay
from forebay.format.files.checkpoint import Checkpoint, CheckpointFile, encode_checkpoint
from forebay.format.index.sections import Footer, FrameEntries, decode_index, encode_index
from tests.cli.rig import Outcome, Shell, changed, filled, flip, one_line, snapshot

pytestmark = pytest.mark.slow


def _findings(outcome: Outcome, severity: str = "error") -> list[dict[str, Any]]:
    return [item for item in outcome.items if item.get("severity") == severity]


def test_a_sound_directory_is_found_sound(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log", rotations=2, records=20)

    text = shell.ok("verify").out
    summary = shell.ok("verify", "--json").items[-1]

    assert text.startswith("all sound")
    assert summary["clean"] is True and summary["findings"] == 0
    assert (summary["shards"], summary["files"], summary["records"]) == (1, 3, 60)
    assert summary["bytes"] == sum(path.stat().st_size for path in shell.segments())


def test_every_flipped_byte_of_every_file_is_noticed_and_nothing_is_changed(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log", rotations=1, records=3)
    shard = shell.shards()[0]
    files = [*shard.glob("*.seg"), *shard.glob("*.idx"), shard / "checkpoint"]
    newest = max(shard.glob("*.seg"))
    missed = []

    for path in files:
        size = path.stat().st_size
        for byte in range(0, size, max(1, size // 12)):
            flip(path, byte)
            before = snapshot(shell.directory)
            outcome = shell.run("verify", "--json")
            torn = path == newest and _findings(outcome, "note")
            if outcome.code != 6 and not torn:
                missed.append((path.name, byte))
            assert snapshot(shell.directory) == before
            flip(path, byte)

    assert missed == []
    assert shell.ok("verify").code == 0


def test_a_damaged_frame_is_named_by_file_byte_and_offsets(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log", rotations=2, records=20)
    segment = shell.segments()[1]
    flip(segment, -20)

    outcome = shell.run("verify", "--json")

    (finding,) = _findings(outcome)
    assert outcome.code == 6
    assert finding["shard"] == "shop/orders[0]" and finding["file"] == str(segment)
    assert finding["byte"] > 64 and finding["offsets"] == [20, 40]
    assert "backup" in finding["next_step"]


def _cut(content: bytes) -> bytes:
    return content[:-8]


def _longer(content: bytes) -> bytes:
    return content + bytes(8)


def test_a_torn_tail_is_a_note(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    with forebay.open(str(directory)) as log:
        log.create_topic("t").append(b"whole")
    shell = Shell(directory)
    changed(shell.segments()[0], lambda content: content + b"\x07" * 30)

    outcome = shell.ok("verify", "--json")

    (note,) = _findings(outcome, "note")
    assert "30 torn bytes" in note["what"] and note["byte"] == shell.segments()[0].stat().st_size - 30


@pytest.mark.parametrize(
    ("place", "change", "said"),
    [
        (0, _cut, "8 bytes too early"),
        (0, lambda content: b"", "header"),
        (0, lambda content: bytes(64) + content[64:], "header"),
        (0, lambda content: content[:4] + b"\x02" + content[5:], "header"),
        (2, lambda content: content[:64], "no state frame"),
    ],
)
def test_damage_to_segments(tmp_path: Path, place: int, change: Callable[[bytes], bytes], said: str) -> None:
    shell = filled(tmp_path / "log", rotations=2)
    changed(shell.segments()[place], change)

    outcome = shell.run("verify")

    assert outcome.code == 6 and said in outcome.out
    assert outcome.err == ""


def test_bytes_behind_a_sealed_file_are_a_warning(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log", rotations=2)
    changed(shell.segments()[0], _longer)

    outcome = shell.ok("verify")

    assert "warning" in outcome.out and "8 bytes behind the sealed ones" in outcome.out


def test_a_missing_file_is_a_gap_in_the_sequence(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log", rotations=2, records=20)
    shell.segments()[1].unlink()

    outcome = shell.run("verify", "--json")

    findings = _findings(outcome)
    assert outcome.code == 6
    assert [20, 40] in [finding.get("offsets") for finding in findings if "missing" in finding["what"]]
    assert any(finding["file"].endswith(".idx") for finding in findings)


def test_a_segment_of_another_shard_and_a_renamed_one_are_named(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log", rotations=2)
    other = filled(tmp_path / "other", rotations=2)
    shell.segments()[0].write_bytes(other.segments()[0].read_bytes())
    second = shell.segments()[1]
    second.rename(second.with_name("00000000000000000021-00000001.seg"))

    outcome = shell.run("verify")

    assert outcome.code == 6
    assert "belongs to shard" in outcome.out and "give it its own name back" in outcome.out


def _other_hash(content: bytes) -> bytes:
    footer, entries, gaps = _decoded(content)
    return encode_index(msgspec.structs.replace(footer, content_hash=bytes(16)), entries, gaps)


def _other_entry(content: bytes) -> bytes:
    footer, entries, gaps = _decoded(content)
    changed_entries = entries.copy()
    changed_entries["time_max"][0] += 1
    return encode_index(footer, changed_entries, gaps)


def _decoded(content: bytes) -> tuple[Footer, FrameEntries, list[forebay.Gap]]:
    decoded = decode_index(content)
    assert isinstance(decoded, tuple)
    return decoded


@pytest.mark.parametrize(
    ("change", "said"),
    [(_other_hash, "not the one that was sealed"), (_other_entry, "does not fit its frames: entry 0 differs")],
)
def test_an_index_that_is_whole_and_does_not_fit_is_an_error_that_repair_mends(
    tmp_path: Path, change: Callable[[bytes], bytes], said: str
) -> None:
    shell = filled(tmp_path / "log", rotations=1)
    changed(shell.segments()[0].with_suffix(".idx"), change)

    outcome = shell.run("verify")
    shell.ok("repair", "--apply")

    assert outcome.code == 6 and said in outcome.out
    assert shell.run("verify").code == 0


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        (b"", "is torn"),
        (b"nonsense" * 9, "is damaged"),
        (encode_checkpoint(Checkpoint(files=(CheckpointFile(0, 1, 21),), durable=0, rotated_at=0)), "ends at 21"),
        (encode_checkpoint(Checkpoint(files=(CheckpointFile(7, 1, 99),), durable=0, rotated_at=0)), "which is missing"),
        (encode_checkpoint(Checkpoint(files=(), durable=61, rotated_at=0)), "durable up to 61"),
    ],
)
def test_a_checkpoint_that_does_not_agree_is_an_error(tmp_path: Path, checkpoint: bytes, said: str) -> None:
    shell = filled(tmp_path / "log", rotations=2, records=20)
    (shell.shards()[0] / "checkpoint").write_bytes(checkpoint)

    outcome = shell.run("verify")

    assert outcome.code == 6 and said in outcome.out


def test_a_lost_checkpoint_and_a_lost_live_file_are_no_damage(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    (shell.shards()[0] / "checkpoint").unlink()
    (shell.shards()[0] / "live").unlink()

    assert shell.ok("verify").out.startswith("all sound")


def test_leftovers_and_what_was_set_aside_are_notes(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    (shell.shards()[0] / "checkpoint.tmp").write_bytes(b"half")
    (shell.shards()[0] / "aside").mkdir()
    (shell.shards()[0] / "aside" / "old").write_bytes(b"old")
    (shell.shards()[0] / "holiday.jpg").write_bytes(b"jpg")

    outcome = shell.ok("verify", "--json")

    assert len(_findings(outcome, "note")) == 2
    assert len(_findings(outcome, "warning")) == 1


def test_an_orphan_directory_is_a_warning(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    other = filled(tmp_path / "other")
    orphan = other.shards()[0]
    orphan.rename(shell.directory / "shards" / orphan.name)

    outcome = shell.ok("verify")

    assert "belongs to no topic" in outcome.out
    assert "2 shards" in outcome.out


def test_metadata_older_than_the_log_is_an_error(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    shell = filled(directory, rotations=0)
    store = directory / "metadata.sqlite"
    kept = store.read_bytes()
    with forebay.open(str(directory)) as log:
        log.topic("shop/orders").append(b"later")
    store.write_bytes(kept)
    for name in ("metadata.sqlite-wal", "metadata.sqlite-shm"):
        (directory / name).unlink(missing_ok=True)

    outcome = shell.run("verify")

    assert outcome.code == 6 and "of epoch 2, the metadata store knows only 1" in outcome.out


def test_a_damaged_metadata_store_is_an_error(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    changed(shell.directory / "metadata.sqlite", lambda content: b"x" * len(content))
    for name in ("metadata.sqlite-wal", "metadata.sqlite-shm"):
        (shell.directory / name).unlink(missing_ok=True)

    outcome = shell.run("verify")

    assert outcome.code == 6 and "metadata" in outcome.out


def test_a_damaged_marker_is_an_error(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    (shell.directory / "forebay.json").write_bytes(b"{")

    outcome = shell.run("verify")

    assert outcome.code == 6 and "forebay.json is damaged" in outcome.out


def test_one_topic_alone(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    shell.ok("topic", "create", "other")
    shell.ok("produce", "other", stdin=b"1\n")
    flip(shell.segments()[0], -20)
    flip(shell.segments()[1], -20)

    assert shell.run("verify", "shop/orders", "--json").items[-1]["shards"] == 1
    assert shell.run("verify", "nope").code == 2


def test_verifying_beside_an_owner_that_goes_on(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "log")
    with forebay.open(str(shell.directory), {"wal": {"rotate_bytes_max": 4096}}) as log:
        topic = log.create_topic("t", partitions=2)
        for turn in range(8):
            for number in range(100):
                topic.append(b"%d" % number * 10, key=b"%d" % number)

            outcome = shell.run("verify", "--json")

            assert outcome.code == 0, outcome.out
            assert outcome.items[-1]["records"] == (turn + 1) * 100


def test_a_newer_segment_is_no_damage_but_not_readable(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log", rotations=0)
    marker = shell.directory / "forebay.json"
    fields = json.loads(marker.read_bytes())
    marker.write_text(json.dumps({**fields, "format": 99}))

    outcome = shell.run("verify")

    assert outcome.code == 8 and one_line(outcome.err) and "upgrade" in outcome.err
