"""What would hold the event loop is made by a thread, and is the same; a first request has nothing left to load."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.broker import app
from forebay.broker.app import Broker
from forebay.pages import LOOP_RECORDS_MAX
from tests.support.brokers import running_broker


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with running_broker(tmp_path_factory.mktemp("broker") / "data") as broker, broker.client() as client:
        yield client


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The calls that threads have made."""
    found: list[object] = []
    compute = Broker.compute

    async def note(broker: Broker, call: Callable[[], Any]) -> Any:
        found.append(call)
        return await compute(broker, call)

    monkeypatch.setattr(Broker, "compute", note)
    return found


@pytest.mark.parametrize("address", ["/v1/topics?prefix=many/", "/v1/status"])
def test_an_answer_of_many_items_is_made_by_a_thread(
    client: httpx.Client, computed: list[object], monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    for number in range(2):
        assert client.put(f"/v1/topics/many/t{number}", json={"exist_ok": True, "partitions": 2}).is_success
        # A shard that nothing was appended to need not be open.
        assert client.post(f"/v1/topics/many/t{number}/records", json=[{"value": "v"}]).status_code == 200

    def answered() -> Any:
        found = client.get(address).json()
        found.pop("workers", None)
        return found

    few = answered()
    assert computed == []
    monkeypatch.setattr(app, "LOOP_ITEMS_MAX", 1)
    assert answered() == few
    assert len(computed) == 1


def test_metrics_are_written_by_a_thread(client: httpx.Client, computed: list[object]) -> None:
    assert "forebay_ready 1.0" in client.get("/metrics").text
    assert len(computed) == 1


@pytest.mark.parametrize("media", ["application/json", "application/x-ndjson"])
def test_many_small_records_are_decoded_and_encoded_by_a_thread(
    client: httpx.Client, computed: list[object], media: str
) -> None:
    topic = f"/v1/topics/small/{media.rpartition('-')[2].replace('/', '-')}"
    assert client.put(topic).status_code == 201
    for count, threads in ((LOOP_RECORDS_MAX, 0), (LOOP_RECORDS_MAX + 1, 1)):
        computed.clear()
        lines = b'{"value": ""}\n' * count
        body = lines if "nd" in media else json.dumps([{"value": ""}] * count).encode()
        answer = client.post(f"{topic}/records", content=body, headers={"content-type": media})
        assert answer.status_code == 200, answer.text
        first = answer.json()["ranges"][0]["first"]
        assert len(computed) == threads

        computed.clear()
        query = {"start": first, "records_max": count}
        page = client.get(f"{topic}/records", params=query, headers={"accept": media})
        found = page.text.splitlines() if "nd" in media else page.json()["records"]
        assert len(found) == count
        assert len(computed) == threads


SCRIPT = """
import sys
from pathlib import Path
from tests.support.brokers import running_broker
before = "pyarrow.compute" in sys.modules
with running_broker(Path(sys.argv[1])):
    print(before, "pyarrow.compute" in sys.modules, "forebay.wire.arrow_streams" in sys.modules)
"""


@pytest.mark.slow
def test_what_arrow_bodies_need_is_loaded_before_the_broker_is_ready(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "data")]
    found = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120
    )
    assert found.stdout.split()[1:] == ["True", "True"]
