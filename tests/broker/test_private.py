"""What answers show of the server: no path of it, whichever route meets an error, and wherever errors are noted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.aio.workers import Workers
from forebay.broker.routes import Route
from forebay.broker.serve import private_places
from forebay.broker.table import ROUTES
from forebay.errors import Corrupt, ForebayError, Unavailable
from forebay.settings import Settings
from tests.broker.test_rights import right_request
from tests.support.brokers import running_broker

ELSEWHERE = "/srv/forebay/history/shop/0420.seg"


def shared_settings(root: Path, **server: object) -> Settings:
    """A broker whose history is in a directory of its own."""
    tree: dict[str, Any] = {
        "server": {"port": 0, **server},
        "storage": {"mode": "shared_fs"},
        "store": {"root": str(root)},
        "wal": {"dir": str(root.parent / "log")},
    }
    return Settings.load(None, tree, environment={})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Path]]:
    root = tmp_path_factory.mktemp("private")
    settings = shared_settings(root / "history")
    with running_broker(root / "data", settings) as broker, broker.client() as client:
        for name in ("orders", "copy"):
            assert client.put(f"/v1/topics/shop/{name}").status_code == 201
        assert client.post("/v1/topics/shop/orders/records", json=[{"value": "a", "key": "k"}]).status_code == 200
        yield client, root


def shown(text: str, root: Path) -> list[str]:
    """What a text shows of the paths of the server."""
    return [part for part in (str(root), root.name, "/srv/forebay", "history/shop") if part in text]


def _corrupt(root: Path) -> Exception:
    return Corrupt(f'{root}/data/shards/ab_0/0420.seg is damaged, and so is {ELSEWHERE}: run "forebay verify"')


def _unavailable(root: Path) -> Exception:
    return Unavailable(f"the store {root}/history does not answer: [Errno 5] I/O error: '{root}/log/ab_0'")


def _system(root: Path) -> Exception:
    return OSError(5, "I/O error", f"{root}/data/metadata.sqlite")


@pytest.mark.parametrize("make", [_corrupt, _unavailable, _system])
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_no_route_shows_a_path_of_the_server_when_what_it_needs_is_broken(
    served: tuple[httpx.Client, Path],
    route: Route,
    make: Callable[[Path], Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, root = served

    def fail(*_: object) -> asyncio.Future[Any]:
        failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        failed.set_exception(make(root))
        return failed

    for name in ("_start", "start_reading"):
        monkeypatch.setattr(Workers, name, fail)
    with client.stream(**right_request(route)) as answer:
        text = answer.read().decode() if answer.status_code >= 400 or not route.is_stream else ""
    assert shown(text, root) == []
    if isinstance(make(root), ForebayError) and answer.status_code >= 500:
        # The rest of the message is there: the caller can say what it is about.
        assert "…" in text


def test_what_is_noted_of_failed_exports_names_no_path(tmp_path: Path) -> None:
    settings = shared_settings(tmp_path / "history")
    with running_broker(tmp_path / "data", settings) as broker, broker.client() as client:
        assert client.put("/v1/topics/shop/orders").status_code == 201
        assert client.post("/v1/topics/shop/orders/records", json=[{"value": "a"}]).status_code == 200
        assert client.post("/v1/groups/g/commit", json={"topic": "shop/orders", "offset": 1}).status_code == 200
        (tmp_path / "history").rename(tmp_path / "away")
        (tmp_path / "history").write_text("no directory")

        texts = [client.post("/v1/topics/shop/orders/export").text]
        status = client.get("/v1/topics/shop/orders/status")
        assert status.json()["partitions"][0]["export"]["error"]
        texts += [status.text]
        texts += [client.get(path).text for path in ("/v1/status", "/v1/ready", "/v1/groups/g", "/metrics")]
        texts += [client.get("/v1/topics/shop/orders/segments").text]
        (tmp_path / "history").unlink()
        (tmp_path / "away").rename(tmp_path / "history")
    assert [text for text in texts if shown(text, tmp_path)] == []


def test_the_places_of_all_settings_are_private() -> None:
    settings = shared_settings(Path("/mnt/history"))
    assert private_places("data", settings)[-1] == "data"
    assert {"/mnt/history", "/mnt/log", str(Path("data").absolute())} <= set(private_places("data", settings))
    assert private_places(":memory:", Settings.load(None, {}, environment={})) == ()
