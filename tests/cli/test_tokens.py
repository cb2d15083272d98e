"""`forebay token`: create, list and revoke, also while another process has the directory open."""

from __future__ import annotations

from pathlib import Path

import pytest

import forebay
from forebay.clock import SystemClock
from forebay.service.tokens import TokenBook
from forebay.testing.inside import inside
from tests.cli.rig import Shell, one_line, snapshot


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "log")


def create(shell: Shell, *more: str) -> str:
    return shell.ok("token", "create", "billing", "--scope", "write", "--topics", "shop/", *more).out.strip()


def test_a_token_is_made_with_its_directory_and_its_secret_is_shown_once(shell: Shell) -> None:
    secret = create(shell)

    assert secret.startswith("fbt_") and len(secret) == 47
    listing = shell.ok("token", "list").out
    assert "billing" in listing and "write" in listing and "shop/" in listing and "valid" in listing
    assert secret not in listing
    assert all(secret[4:].encode() not in content for content in snapshot(shell.directory).values())


def test_the_answers_in_json(shell: Shell) -> None:
    (made,) = shell.ok(
        "token", "create", "audit", "--scope", "read", "--scope", "admin", "--topics", "*", "--json",
        "--expires", "2131-05-06T00:00:00Z",
    ).items  # fmt: skip
    assert made["secret"].startswith("fbt_")
    assert made["scopes"] == ["admin", "read"] and made["topics"] == ["*"]
    assert made["expires_at"] == 5_091_465_600_000

    (item,) = shell.ok("token", "list", "--json").items
    assert item["state"] == "valid" and "secret" not in item and item["id"] == made["id"]
    (revoked,) = shell.ok("token", "revoke", made["id"], "--json").items
    assert revoked["revoked_at"] >= made["created_at"]
    assert [item["state"] for item in shell.ok("token", "list", "--json").items] == ["revoked"]


def test_a_token_is_made_and_revoked_beside_the_process_that_has_the_directory(shell: Shell) -> None:
    with forebay.open(shell.directory) as log:
        book = TokenBook(inside(log).metadata, log.settings.metadata.prefix, SystemClock())
        secret = create(shell)
        book.step()
        assert book.principal(secret).name == "billing"

        token_id = shell.ok("token", "list", "--json").items[0]["id"]
        assert shell.ok("token", "revoke", token_id).out == f"{token_id} of billing is revoked\n"
        book.step()
        with pytest.raises(forebay.Unauthenticated):
            book.principal(secret)
        book.close()


def test_the_prefix_of_the_metadata_store_is_respected(shell: Shell) -> None:
    create(shell, "--set", "metadata.prefix=/other")

    assert shell.ok("token", "list", "--json").items == []
    assert len(shell.ok("token", "list", "--json", "--set", "metadata.prefix=/other").items) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["create", "billing", "--scope", "root", "--topics", "shop/"], "scope is 'root'"),
        (["create", "billing", "--scope", "read", "--topics", "shop"], "is not a topic prefix"),
        (["create", "billing", "--topics", "shop/"], "--scope"),
        (["create", "billing", "--scope", "read"], "--topics"),
        (["create", "billing", "--scope", "read", "--topics", "*", "--expires", "soon"], "--expires is 'soon'"),
        (["create", "billing", "--scope", "read", "--topics", "*", "--expires", "7ms"], "expired already"),
        (["revoke", "0123456789abcdef"], "there is no token '0123456789abcdef'"),
    ],
)
def test_a_wrong_call_is_refused_in_one_line(shell: Shell, words: list[str], message: str) -> None:
    create(shell)

    refused = shell.run("token", *words)

    assert refused.code == 2 and refused.out == ""
    assert one_line(refused.err) and message in refused.err


def test_no_directory_is_made_to_look_into(shell: Shell) -> None:
    for words in (["list"], ["revoke", "0123456789abcdef"]):
        refused = shell.run("token", *words)
        assert refused.code == 2 and "is not a Forebay data directory" in refused.err
    assert not shell.directory.exists()
    assert Shell(Path(":memory:")).run("token", "create", "a", "--scope", "read", "--topics", "*").code == 2


@pytest.mark.parametrize(
    "words",
    [["--scope", "root", "--topics", "shop/"], ["--scope", "read", "--topics", "shop"]],
    ids=["scope", "prefix"],
)
def test_a_creation_that_is_refused_makes_no_directory(shell: Shell, words: list[str]) -> None:
    assert shell.run("token", "create", "billing", *words).code == 2
    assert not shell.directory.exists()


def test_tokens_that_ended_lately_are_not_pruned(shell: Shell) -> None:
    create(shell)
    [token] = shell.ok("token", "list", "--json").items
    shell.ok("token", "revoke", token["id"])
    assert shell.ok("token", "prune").out == ""
    assert len(shell.ok("token", "list", "--json").items) == 1
