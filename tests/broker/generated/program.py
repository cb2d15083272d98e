"""What a user of the generated Python client writes; it runs where the package `forebay_http` can be imported.

`python program.py URL TOKEN` prints what it saw as one JSON object.
"""

from __future__ import annotations

import json
import sys

from forebay_http import AuthenticatedClient, Client
from forebay_http.api.broker import get_health, get_metrics, get_openapi
from forebay_http.api.records import append_records, read_records
from forebay_http.api.topics import delete_topic, list_topics, put_topic
from forebay_http.models import ErrorBody, PageBody, RecordItem, RecordsBody, TopicPut
from forebay_http.models.durability import Durability


def main(url: str, token: str) -> dict[str, object]:
    """Create a topic, append, read, list, delete, and meet an error; with what each call gave."""
    client = AuthenticatedClient(base_url=url, token=token, raise_on_unexpected_status=True)
    seen: dict[str, object] = {}
    made = put_topic.sync("shop", "orders", client=client, body=TopicPut(partitions=1, durability=Durability.FSYNC))
    seen["created"] = [made.name, made.durability.value]
    body = RecordsBody(records=[RecordItem(value="one", key="anna", tag="new"), RecordItem(value="two")])
    for _ in range(2):
        # A repeat with the same key: stored once.
        appended = append_records.sync("shop", "orders", client=client, body=body, idempotency_key="first")
    seen["appended"] = [[each.partition, each.first, each.count] for each in appended.ranges]
    page = read_records.sync("shop", "orders", client=client, start="earliest")
    assert isinstance(page, PageBody)
    seen["read"] = [[record.offset, record.value] for record in page.records]
    seen["key"] = page.records[0].key
    seen["listed"] = [topic.name for topic in list_topics.sync(client=client).topics]
    seen["deleted"] = int(delete_topic.sync_detailed("shop", "orders", client=client).status_code)
    refused = read_records.sync_detailed("shop", "orders", client=client)
    assert isinstance(refused.parsed, ErrorBody)
    seen["refused"] = [int(refused.status_code), refused.parsed.error.code]
    stranger = list_topics.sync_detailed(client=AuthenticatedClient(base_url=url, token="fbt_not_one"))
    assert isinstance(stranger.parsed, ErrorBody)
    seen["stranger"] = [int(stranger.status_code), stranger.parsed.error.code]
    seen["metrics"] = "forebay_" in get_metrics.sync(client=client)
    seen["health"] = get_health.sync(client=Client(base_url=url)).status
    seen["title"] = get_openapi.sync(client=Client(base_url=url)).additional_properties["info"]["title"]
    return seen


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
