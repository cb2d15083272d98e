"""A data directory whose metadata lies in etcd: the same topics, found again by whoever has the directory."""

from __future__ import annotations

from pathlib import Path

import pytest

import forebay
from tests.metadata.etcd.cluster import Cluster
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
