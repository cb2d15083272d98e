"""A consumer process over HTTP: takes records, says which, and waits for more until it is killed.

    python holding.py http://127.0.0.1:7878 /v1/topics/shop/orders/subscriptions/billing/consumers/one

Of the standard library alone, so that it is there at once.
"""

from __future__ import annotations

import http.client
import json
import sys
from typing import Any
from urllib.parse import urlsplit


def asked(connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any]) -> Any:
    """The answer to a request."""
    connection.request(method, path, json.dumps(body))
    return json.loads(connection.getresponse().read())


def hold(url: str, consumer: str) -> None:
    """Take five records without acknowledging them; the next pull is under way when this process is killed."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port)
    asked(connection, "PUT", consumer, {"session_timeout_ms": 300})
    records = asked(connection, "POST", f"{consumer}/pull", {"max": 5, "wait_ms": 30_000})["records"]
    sys.stdout.write(json.dumps([each["record"]["offset"] for each in records]) + "\n")
    sys.stdout.flush()
    asked(connection, "POST", f"{consumer}/pull", {"max": 1, "wait_ms": 60_000})


if __name__ == "__main__":
    hold(sys.argv[1], sys.argv[2])
