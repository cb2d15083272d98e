"""A data directory whose metadata lies in etcd: the same topics, found again by whoever has the directory."""

from __future__ import annotations

from pathlib import Path

import pytest

import forebay
from forebay.clock import SystemClock
from forebay.service.tokens import TokenBook
from tests.cli.rig import Shell
from tests.metadata.etcd.conftest import OpenStore
from tests.support.etcd import Cluster
from tests.support.waiting import until


def _settings(cluster: Cluster) -> dict[str, object]:
    return {"metadata": {"backend": "etcd", "endpoints": list(cluster.endpoints), "prefix": "/forebay-storage"}}


def test_topics_of_a_directory_are_found_again_through_etcd(cluster: Cluster, tmp_path: Path) -> None:
    path = str(tmp_path / "data")
    with forebay.open(path, _settings(cluster)) as log:
        log.create_topic("shop/orders", durability="fsync").append_many([b"a", b"b"])

    with forebay.open(path, _settings(cluster)) as log:
        orders = log.topic("shop/orders")

        assert orders.append(b"c") == 2
        assert [record.value for record in orders.read()] == [b"a", b"b", b"c"]


def test_another_directory_may_not_go_on_with_records_it_does_not_have(cluster: Cluster, tmp_path: Path) -> None:
    settings = _settings(cluster)
    with forebay.open(str(tmp_path / "first"), settings) as log:
        log.create_topic("shop/orders").append(b"a")

    with (
        forebay.open(str(tmp_path / "second"), settings) as other,
        pytest.raises(forebay.Conflict, match="its records lie there"),
    ):
        other.topic("shop/orders").append(b"b")


def test_a_topic_is_refused_while_another_directory_has_it_open(cluster: Cluster, tmp_path: Path) -> None:
    settings = _settings(cluster)
    with forebay.open(str(tmp_path / "first"), settings) as log:
        log.create_topic("shop/orders").append(b"a")

        with (
            forebay.open(str(tmp_path / "second"), settings) as other,
            pytest.raises(forebay.Unavailable, match="living session"),
        ):
            other.topic("shop/orders").append(b"b")


def test_a_topic_that_another_process_alters_and_creates_again_is_found_so(cluster: Cluster, tmp_path: Path) -> None:
    settings = _settings(cluster)
    with (
        forebay.open(str(tmp_path / "first"), settings) as here,
        forebay.open(str(tmp_path / "second"), settings) as there,
    ):
        first = here.create_topic("shop/followed")
        held = there.topic("shop/followed")
        here.alter_topic("shop/followed", partitions=3)
        until(lambda: held.partitions == there.topic("shop/followed").partitions == 3)
        here.delete_topic("shop/followed")
        second = here.create_topic("shop/followed")

        until(lambda: there.topic("shop/followed").spec == second.spec != first.spec)


def test_a_token_is_made_without_a_directory_and_its_revocation_is_obeyed(
    cluster: Cluster, open_store: OpenStore, tmp_path: Path
) -> None:
    endpoints = ",".join(cluster.endpoints)
    common = [f"--set=metadata.{name}" for name in ("backend=etcd", f"endpoints={endpoints}", "prefix=/forebay-tokens")]
    shell = Shell(tmp_path / "absent")
    book = TokenBook(open_store(), "/forebay-tokens", SystemClock())
    book.start()

    (made,) = shell.ok("token", "create", "billing", "--scope=read", "--topics=*", "--json", *common).items
    until(lambda: _principal(book, made["secret"]) == "billing")
    shell.ok("token", "revoke", made["id"], *common)
    until(lambda: _principal(book, made["secret"]) is None)

    book.close()
    assert not shell.directory.exists()


def _principal(book: TokenBook, secret: str) -> str | None:
    try:
        return book.principal(secret).name
    except forebay.Unauthenticated:
        return None
