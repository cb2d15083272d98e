"""`forebay verify` and `forebay repair` on history: each copy is checked, and mended from the other."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import forebay
from forebay.catalog import ShardCatalog
from forebay.disk import SystemDisk
from forebay.format.metadata.descriptor import Cur, DescriptorKind, Phase, SegmentDescriptor, ShardState
from forebay.format.metadata.value import decode_value, encode_value
from forebay.metadata import Delete, Operation, Put
from forebay.testing.simulated.clock import ManualClock
from tests.cli.rig import Outcome, changed, flip
from tests.inspection.exported import KEYS, Exported, HistoryShell
from tests.ledger import Ledger

pytestmark = pytest.mark.slow

Harm = Callable[[Path], None]
Change = Callable[[SegmentDescriptor], SegmentDescriptor]


def _flipped_early(path: Path) -> None:
    flip(path, 20)


def _flipped_late(path: Path) -> None:
    flip(path, -20)


def _cut(path: Path) -> None:
    changed(path, lambda content: content[: len(content) // 2])


def _longer(path: Path) -> None:
    changed(path, lambda content: content + bytes(8))


def _emptied(path: Path) -> None:
    changed(path, lambda content: b"")


def _lost(path: Path) -> None:
    path.unlink()


def _exchanged(path: Path) -> None:
    """The bytes of another whole one of the same kind."""
    other = max(found for found in path.parent.glob(f"*{path.suffix}") if found != path)
    path.write_bytes(other.read_bytes())


HARMS: list[Harm] = [_flipped_early, _flipped_late, _cut, _longer, _emptied, _lost, _exchanged]


def _named(harm: Harm) -> str:
    return harm.__name__.strip("_")


def _errors(outcome: Outcome) -> list[dict[str, Any]]:
    return [item for item in outcome.items if item.get("severity") == "error"]


def _repaired(exported: Exported) -> None:
    """Plan without a change, do it, and find all sound; repeating it does nothing."""
    shell, harmed = exported.shell, exported.content()
    planned = shell.run("repair")
    assert exported.content() == harmed, "a plan has changed something"
    assert planned.code == 0 and "planned, nothing changed" in planned.out
    assert shell.ok("repair", "--apply").out.startswith("done: ")
    assert shell.ok("verify").out.splitlines()[-1].startswith("all sound")
    assert shell.ok("repair", "--apply").out == "nothing to repair\n"


def test_sound_history_is_found_sound_and_its_state_is_shown(tmp_path: Path) -> None:
    exported = Exported(tmp_path)

    text = exported.shell.ok("verify").out
    quick = exported.shell.ok("verify", "--quick", "--json").items
    items = exported.shell.ok("verify", "--json").items

    assert "shop/orders[0]: open, epoch 1" in text and "history [0, 60) in 3 segments" in text
    size = sum(path.stat().st_size for path in exported.root.rglob("*.seg"))
    assert (items[-1]["objects"], items[-1]["object_bytes"]) == (3, size)
    assert quick == items and items[-2]["history"] == [0, 60]


@pytest.mark.parametrize("harm", HARMS, ids=_named)
def test_a_harmed_object_is_found_and_uploaded_again(tmp_path: Path, harm: Harm, ledger: Ledger) -> None:
    exported = Exported(tmp_path)
    sound, path = exported.content(), exported.object(1)
    harm(path)
    evidence = path.read_bytes() if path.exists() else None

    outcome = exported.shell.run("verify", "--json")

    found = _errors(outcome)
    assert outcome.code == 6 and {error["file"] for error in found} == {f"directory {path}"}
    assert all(20 <= error["offsets"][0] <= error["offsets"][1] <= 40 for error in found)
    assert all("forebay repair" in error["next_step"] for error in found)
    _repaired(exported)
    assert exported.content() == sound
    kept = list((exported.shard / "aside").glob("*.seg.1")) if evidence is not None else []
    assert [path.read_bytes() for path in kept] == ([evidence] if evidence is not None else [])
    ledger.count("harmed copies", side="object")


@pytest.mark.parametrize("harm", HARMS, ids=_named)
def test_a_harmed_index_object_is_found_and_rebuilt(tmp_path: Path, harm: Harm, ledger: Ledger) -> None:
    exported = Exported(tmp_path)
    sound, path = exported.content(), exported.object(1, ".idx")
    harm(path)

    outcome = exported.shell.run("verify", "--json")

    (error,) = _errors(outcome)
    assert outcome.code == 6 and error["file"] == f"directory {path}" and error["offsets"] == [20, 40]
    _repaired(exported)
    assert exported.content() == sound
    ledger.count("harmed copies", side="index object")


LOCAL = [harm for harm in HARMS if harm is not _longer]


@pytest.mark.parametrize("index", ["sound", "lost", "damaged"])
@pytest.mark.parametrize("harm", LOCAL, ids=_named)
def test_a_harmed_local_file_is_found_and_fetched_again(tmp_path: Path, harm: Harm, index: str, ledger: Ledger) -> None:
    exported = Exported(tmp_path)
    sound, path = exported.content(), exported.local(1)
    harm(path)
    evidence = [path.read_bytes()] if path.exists() else []
    if index == "lost":
        path.with_suffix(".idx").unlink()
    elif index == "damaged":
        flip(path.with_suffix(".idx"), 60)

    outcome = exported.shell.run("verify", "--json")

    assert outcome.code == 6
    assert any("forebay repair" in error["next_step"] for error in _errors(outcome))
    _repaired(exported)
    assert exported.content() == sound
    assert [kept.read_bytes() for kept in (exported.shard / "aside").glob("*.seg.1")] == evidence
    assert len(exported.shell.ok("consume", "shop/orders").out.splitlines()) == 80
    ledger.count("harmed copies", side="local file")


def _checkpoint(content: dict[str, bytes]) -> dict[str, bytes]:
    return {name: value for name, value in content.items() if name.endswith("/checkpoint")}


def test_index_files_on_both_sides_are_rebuilt(tmp_path: Path) -> None:
    exported = Exported(tmp_path)
    sound = exported.content()
    _flipped_late(exported.local(0, ".idx"))
    _lost(exported.object(0, ".idx"))

    _repaired(exported)

    assert {**exported.content(), **_checkpoint(sound)} == sound, "but for the time of the rebuilt checkpoint"


def test_several_harms_at_once_are_each_mended_from_the_other_side(tmp_path: Path) -> None:
    exported = Exported(tmp_path)
    sound = exported.content()
    _flipped_late(exported.local(0))
    _lost(exported.object(1))
    _lost(exported.object(2, ".idx"))
    _lost(exported.local(2))

    _repaired(exported)

    assert exported.content() == sound


@pytest.mark.parametrize("local", [_flipped_late, _cut, _lost], ids=_named)
@pytest.mark.parametrize("remote", [_flipped_late, _cut, _lost, _exchanged], ids=_named)
def test_damage_of_one_range_on_both_sides_is_said_and_nothing_is_overwritten(
    tmp_path: Path, local: Harm, remote: Harm
) -> None:
    exported = Exported(tmp_path)
    remote(exported.object(1))
    local(exported.local(1))
    harmed = exported.content()

    found = exported.shell.run("verify", "--json")
    outcome = exported.shell.run("repair", "--apply", "--json")

    assert found.code == 6
    assert not any("forebay repair" in error["next_step"] for error in _errors(found))
    refused = [step for step in outcome.items if step["action"] == "cannot repair"]
    assert outcome.code == 6 and [20, 40] in [step["offsets"] for step in refused]
    assert exported.content() == harmed
    assert not (exported.shard / "aside").exists()


def test_a_front_that_the_catalog_has_is_not_missed_and_not_fetched(tmp_path: Path) -> None:
    exported = Exported(tmp_path)
    for path in (exported.local(0), exported.local(0, ".idx"), exported.local(1)):
        _lost(path)
    sound = exported.content()

    outcome = exported.shell.ok("verify", "--json")

    (note,) = [item for item in outcome.items if item.get("severity") == "note"]
    assert note["file"].endswith(".idx") and note["offsets"] == [20, 40]
    assert not [step for step in exported.shell.ok("repair", "--json").items if step["action"] == "fetch again"]
    assert exported.content() == sound


def test_a_front_that_the_catalog_has_not_is_missed(tmp_path: Path) -> None:
    exported = Exported(tmp_path)
    for path in (exported.local(0), exported.local(1)):
        _lost(path)
    with exported.metadata() as metadata:
        metadata.transaction([], [Delete(KEYS.segment(0))])

    errors = _errors(exported.shell.run("verify", "--json"))

    assert [0, 40] in [
        error.get("offsets") for error in errors if "file with these offsets is missing" in error["what"]
    ]


def test_without_a_local_copy_a_lost_object_is_said_plainly(tmp_path: Path) -> None:
    exported = Exported(tmp_path)
    for path in (exported.local(0), exported.local(0, ".idx")):
        _lost(path)
    _flipped_late(exported.object(0))

    found = exported.shell.run("verify", "--json")
    outcome = exported.shell.run("repair", "--apply", "--json")

    assert all("backup" in error["next_step"] for error in _errors(found))
    (step,) = [step for step in outcome.items if step["action"] == "cannot repair"]
    assert outcome.code == 6 and step["offsets"] == [0, 20] and "no other sound copy" in step["why"]


def test_quick_looks_at_sizes_and_does_not_read(tmp_path: Path) -> None:
    exported = Exported(tmp_path, records=4000)
    flip(exported.object(0), 5000)

    assert exported.shell.ok("verify", "--quick").code == 0
    assert exported.shell.run("verify").code == 6
    _cut(exported.object(1))
    assert exported.shell.run("verify", "--quick").code == 6


def _rewrite(exported: Exported, place: int, change: Change) -> None:
    with exported.metadata() as metadata:
        old = ShardCatalog(metadata, KEYS, "", clock=ManualClock()).pieces()[place].descriptor
        metadata.transaction([], [Put(KEYS.segment(old.start), encode_value(change(old)))])


def test_another_etag_of_sound_bytes_is_recorded_again(tmp_path: Path) -> None:
    exported = Exported(tmp_path)
    etags = [piece.etag for piece in exported.descriptors()]
    _rewrite(exported, 1, lambda piece: msgspec.structs.replace(piece, etag="another"))

    (error,) = _errors(exported.shell.run("verify", "--json"))

    assert "etag" in error["what"] and "forebay repair" in error["next_step"]
    _repaired(exported)
    assert [piece.etag for piece in exported.descriptors()] == etags


def test_an_upload_that_gets_another_etag_is_recorded_with_it(tmp_path: Path) -> None:
    exported = Exported(tmp_path)
    etags = [piece.etag for piece in exported.descriptors()]
    _rewrite(exported, 1, lambda piece: msgspec.structs.replace(piece, etag="another"))
    _lost(exported.object(1))

    _repaired(exported)

    assert [piece.etag for piece in exported.descriptors()] == etags


CHANGES: dict[str, Change] = {
    "longer": lambda piece: msgspec.structs.replace(piece, end=piece.end + 5),
    "shorter": lambda piece: msgspec.structs.replace(piece, end=piece.end - 5),
    "other topic": lambda piece: msgspec.structs.replace(piece, topic_id="ab" * 16),
    "newer epoch": lambda piece: msgspec.structs.replace(piece, epoch=9),
    "other size": lambda piece: msgspec.structs.replace(piece, bytes=piece.bytes + 1),
    "other hash": lambda piece: msgspec.structs.replace(piece, content_hash="00" * 16),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_catalog_that_does_not_fit_is_an_error_and_is_not_mended(tmp_path: Path, name: str) -> None:
    exported = Exported(tmp_path)
    _rewrite(exported, 1, CHANGES[name])
    sound = {key: value for key, value in exported.content().items() if "metadata" not in key}

    found = exported.shell.run("verify")
    exported.shell.run("repair", "--apply")

    assert found.code == 6 and "DAMAGED" in found.out
    assert {key: value for key, value in exported.content().items() if "metadata" not in key} == sound


def _piece(start: int, end: int) -> Put:
    piece = SegmentDescriptor(kind=DescriptorKind.FRAMES, topic_id="", start=start, end=end, epoch=1)
    return Put(KEYS.segment(start), encode_value(piece))


def test_what_a_replacement_hides_is_no_damage(tmp_path: Path) -> None:
    exported = Exported(tmp_path)
    with exported.metadata() as metadata:
        metadata.transaction([], [_piece(25, 40)])

    assert exported.shell.ok("verify").out.splitlines()[-1].startswith("all sound")


@pytest.mark.parametrize(
    ("operation", "said"),
    [
        (Put(KEYS.segment(20), b"nonsense"), "is not readable"),
        (Delete(KEYS.segment(20)), "[20, 40) is covered by nothing"),
        (Delete(KEYS.segment(0)), "[0, 20) is covered by nothing"),
        (Delete(KEYS.segment(40)), "[40, 60) is covered by nothing"),
        (_piece(30, 50), "[30, 40) is covered twice"),
        (_piece(70, 80), "behind the recorded end 60"),
        (Put(KEYS.segment(61), _piece(70, 80).value), "stands under this key"),
        (Delete(KEYS.cur), "no end is recorded"),
        (Put(KEYS.cur, encode_value(Cur(start=20, next=40, epoch=1))), "behind the recorded end 40"),
        (Put(KEYS.cur, encode_value(Cur(start=40, next=70, epoch=1))), "[60, 70) is covered by nothing"),
        (Put(KEYS.cur, encode_value(Cur(start=20, next=60, epoch=1))), "starts at 20, but it starts at 40"),
        (Put(KEYS.cur, b"{}"), "is not readable"),
    ],
)
def test_a_catalog_that_contradicts_itself_is_an_error(tmp_path: Path, operation: Operation, said: str) -> None:
    exported = Exported(tmp_path)
    with exported.metadata() as metadata:
        metadata.transaction([], [operation])

    outcome = exported.shell.run("verify")

    assert outcome.code == 6 and said in outcome.out


@pytest.mark.parametrize(("next_offset", "said"), [(60, "its log goes to 80"), (80, "the catalog: ends at 60")])
def test_a_seal_must_agree_with_history_and_log(tmp_path: Path, next_offset: int, said: str) -> None:
    exported = Exported(tmp_path)
    with exported.metadata() as metadata:
        entry = metadata.get(KEYS.state)
        assert entry is not None
        state = decode_value(entry.value, ShardState)[0]
        sealed = msgspec.structs.replace(state, phase=Phase.SEALED, next_offset=next_offset, owner=None)
        metadata.transaction([], [Put(KEYS.state, encode_value(sealed))])

    outcome = exported.shell.run("verify")

    assert outcome.code == 6 and said in outcome.out and "[0]: sealed, epoch 1" in outcome.out


def test_a_store_that_is_not_there_is_never_taken_for_an_empty_one(tmp_path: Path) -> None:
    exported = Exported(tmp_path)
    exported.root.rename(tmp_path / "unmounted")
    exported.root.mkdir()

    found = exported.shell.run("verify")
    repaired = exported.shell.run("repair", "--apply")

    assert found.code == 4 and "3 objects: cannot be checked" in found.out and "mount it" in found.out
    assert "NOT ALL CHECKED" in found.out
    assert repaired.code == 6 and "cannot be checked" in repaired.out
    assert list(exported.root.iterdir()) == []


def test_a_store_that_may_not_be_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = Exported(tmp_path)
    exists = SystemDisk.exists

    def shut(disk: SystemDisk, path: str) -> bool:
        if path.startswith(str(exported.root)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return exists(disk, path)

    monkeypatch.setattr(SystemDisk, "exists", shut)
    found = exported.shell.run("verify")

    assert found.code == 4 and "look at the rights of the directory" in found.out
    assert "backup" not in found.out and "NOT ALL CHECKED" in found.out


def test_an_object_in_another_store_than_that_of_the_settings_is_not_looked_for(tmp_path: Path) -> None:
    exported = Exported(tmp_path)
    _rewrite(exported, 1, lambda piece: msgspec.structs.replace(piece, store="s3:elsewhere"))

    found = exported.shell.run("verify", "--json")

    (error,) = _errors(found)
    assert found.code == 4 and error["offsets"] == [20, 40] and "not the store of these settings" in error["what"]
    flip(exported.local(0), -20)
    assert exported.shell.run("verify").code == 6


def test_objects_of_a_shard_that_a_living_session_owns_are_left_alone(tmp_path: Path) -> None:
    exported = Exported(tmp_path)
    sound = exported.content()
    _lost(exported.object(0))
    _lost(exported.local(1))
    with exported.metadata() as metadata:
        entry = metadata.get(KEYS.state)
        assert entry is not None
        session = metadata.session(5)
        state = msgspec.structs.replace(decode_value(entry.value, ShardState)[0], owner=session.id, holder="elsewhere")
        metadata.transaction([], [Put(KEYS.state, encode_value(state))])

        outcome = exported.shell.run("repair", "--apply")

        assert outcome.code == 6 and f"owned by the living session {session.id}" in outcome.out
        assert f"owned by session {session.id}; history" in exported.shell.run("verify").out
        assert not exported.root.joinpath(exported.descriptors()[0].object_key).exists()
        assert exported.local(1).exists()

    _repaired(exported)
    assert {k: v for k, v in exported.content().items() if "metadata" not in k} == {
        k: v for k, v in sound.items() if "metadata" not in k
    }


def test_pieces_that_lie_in_the_directory_itself_are_held_against_its_files(tmp_path: Path) -> None:
    exported = Exported(tmp_path)
    marker = msgspec.json.decode((exported.shell.directory / "forebay.json").read_bytes())
    for place in range(3):
        path = exported.local(place)
        key = f"{exported.shard.name}/{path.name}"
        _rewrite(
            exported,
            place,
            lambda piece, key=key: msgspec.structs.replace(  # type: ignore[misc]
                piece, store=f"local:{marker['id']}", object_key=key, etag=None
            ),
        )

    assert exported.shell.ok("verify", "--json").items[-1]["objects"] == 0
    _rewrite(exported, 0, lambda piece: msgspec.structs.replace(piece, store="local:another"))
    assert "lie in another data directory" in exported.shell.ok("verify").out
    _rewrite(exported, 1, lambda piece: msgspec.structs.replace(piece, content_hash="00" * 16))
    assert "is not what was catalogued" in exported.shell.run("verify").out
    _lost(exported.local(2))
    missing = _errors(exported.shell.run("verify", "--json"))
    assert [40, 60] in [error["offsets"] for error in missing if "catalogued, but missing" in error["what"]]
    assert exported.shell.run("repair", "--apply").code == 6


def test_a_log_that_another_directory_has_is_not_missed(tmp_path: Path) -> None:
    shells = [HistoryShell(tmp_path / name, tmp_path / "store", tmp_path / "metadata.sqlite") for name in "ab"]
    with forebay.open(str(shells[0].directory), shells[0].settings) as log:
        log.create_topic("shop/orders").append(b"not history yet")
    forebay.open(str(shells[1].directory), shells[1].settings).close()

    assert "no directory" not in shells[1].ok("verify").out
    shutil.rmtree(shells[0].shards()[0])
    missed = shells[0].run("verify")
    assert missed.code == 6 and "shop/orders[0]: the shard has lost its directory" in missed.out


def test_after_a_move_both_directories_are_sound_and_the_old_one_mends_the_store(tmp_path: Path) -> None:
    shells = [HistoryShell(tmp_path / name, tmp_path / "store", tmp_path / "metadata.sqlite") for name in "ab"]
    with forebay.open(str(shells[0].directory), shells[0].settings) as log:
        orders = log.create_topic("shop/orders", durability="fsync")
        orders.append_many([b"%d" % number for number in range(20)])
        log.seal_topic("shop/orders")
    with forebay.open(str(shells[1].directory), shells[1].settings) as log:
        log.topic("shop/orders").append(b"later")
    assert [shell.ok("verify", "--json").items[-1]["objects"] for shell in shells] == [1, 1]
    (path,) = (tmp_path / "store").rglob("*.seg")
    sound = path.read_bytes()

    _cut(path)

    assert [shell.run("verify").code for shell in shells] == [6, 6]
    assert "no other sound copy" in shells[1].run("repair", "--apply").out
    assert "done: upload again" in shells[0].ok("repair", "--apply").out
    assert [shell.ok("verify").code for shell in shells] == [0, 0] and path.read_bytes() == sound


def test_the_catalog_is_dumped(tmp_path: Path) -> None:
    exported = Exported(tmp_path)

    items = exported.shell.ok("dump", "--catalog", "shop/orders", "--partition", "0", "--json").items
    text = exported.shell.ok("dump", "--catalog", "shop/orders").out

    assert [item["kind"] for item in items] == ["state", "frames", "frames", "frames", "cur"]
    assert [(item["start"], item["end"]) for item in items[1:4]] == [(0, 20), (20, 40), (40, 60)]
    assert items[0]["phase"] == "open" and items[-1]["next"] == 60
    assert all(item["shard"] == "shop/orders[0]" for item in items) and len(text.splitlines()) == 5


@pytest.mark.parametrize(
    "words",
    [
        ["--catalog", "nope"],
        ["--catalog", "shop/orders", "--partition", "1"],
        ["--partition", "0"],
        ["--catalog", "shop/orders", "--key", "/"],
    ],
)
def test_a_catalog_that_is_not_there_is_refused(tmp_path: Path, words: list[str]) -> None:
    assert Exported(tmp_path).shell.run("dump", *words).code == 2
