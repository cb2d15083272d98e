"""Records that were evicted or deleted, as a client reads over them: gaps in band, in every format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from forebay.records import Gap, Reason
from forebay.wire import answers
from forebay.wire.bodies import MediaType
from forebay.wire.limits import BodyLimits
from tests.support.brokers import running_broker


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with running_broker(":memory:") as broker, broker.client() as client:
        yield client


def _capped(client: httpx.Client, name: str) -> str:
    """A topic of which the first six of ten records are evicted, and one of the others is deleted."""
    topic = f"/v1/topics/gaps/{name}"
    assert client.put(topic, json={"cap_records": 4}).status_code == 201
    records = [{"value": f"{number}", "key": f"k{number % 2}", "tag": "eu"} for number in range(10)]
    assert client.post(f"{topic}/records", json=records).status_code == 200
    assert client.post(f"{topic}/retain").status_code == 200
    assert client.delete(f"{topic}/records", params={"start": 7, "stop": 8}).json() == {"records": 1}
    return topic


def _read(client: httpx.Client, topic: str, media: MediaType, **query: Any) -> tuple[list[bytes | None], list[Gap]]:
    """The values and gaps of a page."""
    answer = client.get(f"{topic}/records", params=query, headers={"accept": str(media)})
    assert answer.status_code == 200, answer.text
    if media is MediaType.ARROW:
        marks = answers.PageMarks.of_headers(answer.headers)
        arrow = answers.decode_page_arrow(answer.content, marks, BodyLimits(2**20, 1000))
        return [value for batch in arrow.batches for value in batch["value"].to_pylist()], list(arrow.gaps)
    if media is MediaType.JSON:
        page = answers.decode_page_json(answer.content)
    elif media is MediaType.NDJSON:
        page = answers.decode_page_ndjson(answer.content, answers.PageMarks.of_headers(answer.headers))
    else:
        page = answers.decode_page_frames(answer.content).records()
    return [record.value for record in page.records], list(page.gaps)


@pytest.mark.parametrize("media", [MediaType.JSON, MediaType.NDJSON, MediaType.FRAMES, MediaType.ARROW])
def test_evicted_records_are_a_gap_in_band_and_deleted_ones_are_passed_over(
    client: httpx.Client, media: MediaType
) -> None:
    topic = _capped(client, f"read-{media.name.lower()}")
    assert _read(client, topic, media, start="0") == ([b"6", b"8", b"9"], [Gap(0, 6, Reason.CAP)])
    assert _read(client, topic, media, start="4") == ([b"6", b"8", b"9"], [Gap(4, 6, Reason.CAP)])
    assert _read(client, topic, media, start="earliest") == ([b"6", b"8", b"9"], [])


@pytest.mark.parametrize("media", [MediaType.JSON, MediaType.NDJSON])
@pytest.mark.parametrize(
    ("query", "values"),
    [({"tag": "eu"}, [b"6", b"8", b"9"]), ({"key": "k1", "history": True}, [b"9"]), ({"key": "k1"}, [b"9"])],
)
def test_a_look_up_names_what_it_could_not_see(
    client: httpx.Client, media: MediaType, query: dict[str, Any], values: list[bytes]
) -> None:
    topic = _capped(client, f"look-{media.name.lower()}-{len(query)}-{next(iter(query))}")
    found, gaps = _read(client, topic, media, start="0", **query)
    assert (found, gaps) == (values, [Gap(0, 6, Reason.CAP)])


def test_records_that_are_too_old_are_a_gap_of_that_reason(client: httpx.Client) -> None:
    topic = "/v1/topics/gaps/ttl"
    assert client.put(topic, json={"ttl_ms": 1}).status_code == 201
    assert client.post(f"{topic}/records", json=[{"value": "a"}, {"value": "b"}]).status_code == 200
    while client.get(f"{topic}/offsets").json()["partitions"][0]["evict_floor"] < 2:
        assert client.post(f"{topic}/retain").status_code == 200
    assert _read(client, topic, MediaType.JSON, start="0") == ([], [Gap(0, 2, Reason.TTL)])
