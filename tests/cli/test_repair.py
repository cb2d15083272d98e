"""`forebay repair`: says before it does, keeps what it replaces, and may be repeated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay.format.files.checkpoint import Checkpoint, CheckpointFile, encode_checkpoint
from tests.cli.rig import changed, filled, flip, one_line, snapshot

pytestmark = pytest.mark.slow

Harm = Callable[[Path], None]


def _index(shard: Path) -> Path:
    return min(shard.glob("*.idx"))


def _flip_index(shard: Path) -> None:
    flip(_index(shard), 60)


def _flip_footer(shard: Path) -> None:
    flip(_index(shard), -5)


def _cut_index(shard: Path) -> None:
    changed(_index(shard), lambda content: content[:40])


def _lose_index(shard: Path) -> None:
    _index(shard).unlink()


def _foreign_index(shard: Path) -> None:
    first, second = sorted(shard.glob("*.idx"))[:2]
    first.write_bytes(second.read_bytes())


def _flip_checkpoint(shard: Path) -> None:
    flip(shard / "checkpoint", 20)


def _lying_checkpoint(shard: Path) -> None:
    lie = Checkpoint(files=(CheckpointFile(0, 1, 999),), durable=0, rotated_at=0)
    (shard / "checkpoint").write_bytes(encode_checkpoint(lie))


def _all(shard: Path) -> None:
    for path in shard.glob("*.idx"):
        changed(path, lambda content: b"")
    (shard / "checkpoint").write_bytes(b"")


HARMS: list[Harm] = [
    _flip_index,
    _flip_footer,
    _cut_index,
    _lose_index,
    _foreign_index,
    _flip_checkpoint,
    _lying_checkpoint,
    _all,
]


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__.strip("_"))
def test_what_is_derived_is_rebuilt_as_it_was(tmp_path: Path, harm: Harm) -> None:
    shell = filled(tmp_path / "log", rotations=3)
    shard = shell.shards()[0]
    indexes = {path: path.read_bytes() for path in shard.glob("*.idx")}
    harm(shard)
    harmed = snapshot(shell.directory)

    planned = shell.ok("repair")
    unchanged = snapshot(shell.directory) == harmed
    done = shell.ok("repair", "--apply")

    assert unchanged and "planned, nothing changed" in planned.out
    assert "done: rebuild" in done.out
    assert {path: path.read_bytes() for path in indexes} == indexes
    assert shell.ok("verify").out.splitlines()[-1].startswith("all sound")
    assert shell.ok("repair", "--apply").out == "nothing to repair\n"
    assert len(shell.ok("consume", "shop/orders").out.splitlines()) == 80


def test_what_is_replaced_is_kept_aside_even_twice(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    shard = shell.shards()[0]
    evidence = []

    for byte in (60, 61):
        flip(_index(shard), byte)
        evidence.append(_index(shard).read_bytes())
        shell.ok("repair", "--apply")

    kept = [path.read_bytes() for path in sorted((shard / "aside").glob("*.idx.*"))]
    assert kept == evidence


def test_a_sound_directory_is_left_alone(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    before = snapshot(shell.directory)

    assert shell.ok("repair", "--apply").out == "nothing to repair\n"
    assert snapshot(shell.directory) == before


def test_segments_are_never_changed_and_their_index_stays_as_witness(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    flip(shell.segments()[0], -20)
    before = snapshot(shell.directory)

    outcome = shell.run("repair", "--apply")

    assert outcome.code == 6 and "cannot repair" in outcome.out and "backup" in outcome.out
    assert snapshot(shell.directory) == before


def test_an_index_rebuilt_over_damage_names_the_damage(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log", records=20)
    flip(shell.segments()[0], -20)
    _lose_index(shell.shards()[0])

    shell.ok("repair", "--apply")

    assert "[0, 20) damaged" in shell.ok("consume", "shop/orders").err
    assert shell.run("verify").code == 6


def test_a_newest_file_without_a_header_is_left_to_a_person(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    changed(shell.segments()[-1], lambda content: bytes(64) + content[64:])
    before = snapshot(shell.directory)

    outcome = shell.run("repair", "--apply")

    assert outcome.code == 6 and "cannot repair" in outcome.out
    assert snapshot(shell.directory) == before


def test_leftovers_are_listed(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    (shell.shards()[0] / "checkpoint.tmp").write_bytes(b"half")

    steps = shell.ok("repair", "--json").items

    assert [(step["action"], Path(step["file"]).name) for step in steps] == [("leave", "checkpoint.tmp")]


def test_the_directory_is_needed_for_oneself(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    with forebay.open(str(shell.directory)):
        refused = shell.run("repair")

    assert refused.code == 4 and one_line(refused.err)


def test_the_log_goes_on_after_a_repair(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log", rotations=2, records=20)
    _all(shell.shards()[0])

    shell.ok("repair", "--apply")
    shell.ok("produce", "shop/orders", stdin=b"more\n")

    found = shell.ok("consume", "shop/orders", "--from", "59").out.split()
    assert found == ["2-19", "more"]
