"""Signature version 4 of S3, for the two requests that the object store library does not offer.

Pure: the time comes in. Knows nothing of connections.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import quote, urlsplit

_EMPTY = hashlib.sha256(b"").hexdigest()
_ALGORITHM = "AWS4-HMAC-SHA256"


class Credentials(NamedTuple):
    """What a request is signed with. Shown without its secrets."""

    access_key_id: str
    secret_access_key: str
    session_token: str | None = None

    def __repr__(self) -> str:
        return f"Credentials({self.access_key_id!r}, (hidden))"


def signed_headers(
    method: str, url: str, query: Mapping[str, str], credentials: Credentials, *, region: str, moment: str
) -> dict[str, str]:
    """The headers of a request without a body; `moment` is its time as `YYYYMMDDTHHMMSSZ`."""
    parts = urlsplit(url)
    headers = {"host": parts.netloc, "x-amz-content-sha256": _EMPTY, "x-amz-date": moment}
    if credentials.session_token is not None:
        headers["x-amz-security-token"] = credentials.session_token
    names = ";".join(sorted(headers))
    canonical = "\n".join(
        (
            method,
            quote(parts.path or "/", safe="/~"),
            query_text(query),
            *(f"{name}:{headers[name]}" for name in sorted(headers)),
            "",
            names,
            _EMPTY,
        )
    )
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    text = f"{_ALGORITHM}\n{moment}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    signature = hmac.new(_key(credentials, moment[:8], region), text.encode(), hashlib.sha256).hexdigest()
    grant = f"{_ALGORITHM} Credential={credentials.access_key_id}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**headers, "Authorization": grant}


def query_text(query: Mapping[str, str]) -> str:
    """The query as it is signed and sent."""
    return "&".join(f"{quote(name, safe='~')}={quote(query[name], safe='~')}" for name in sorted(query))


def _key(credentials: Credentials, day: str, region: str) -> bytes:
    key = f"AWS4{credentials.secret_access_key}".encode()
    for step in (day, region, "s3", "aws4_request"):
        key = hmac.new(key, step.encode(), hashlib.sha256).digest()
    return key
