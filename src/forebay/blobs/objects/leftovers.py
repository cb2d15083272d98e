"""Parts of uploads that never came to their end: S3 keeps, and bills, them until the upload is aborted.

The library cannot list them, so two signed requests are made here, which takes an access key in `store.options` or
in the service's variables. Where there is none, and for GCS, a lifecycle rule of the bucket does the same; Azure
forgets by itself.
"""

from __future__ import annotations

import http.client
import logging
import os
import re
import ssl
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import urlsplit
from xml.etree import ElementTree

from forebay.blobs.objects.building import name_of, place
from forebay.blobs.objects.signing import Credentials, query_text, signed_headers
from forebay.blobs.seam import is_key
from forebay.clock import Clock
from forebay.errors import Unavailable
from forebay.settings import StoreSettings

logger = logging.getLogger(__name__)

ANSWER_BYTES_MAX = 16 * 1024 * 1024
PAGES_MAX = 10_000
_NAMES: Mapping[str, tuple[str, ...]] = {
    "access_key_id": ("access_key_id", "aws_access_key_id"),
    "secret_access_key": ("secret_access_key", "aws_secret_access_key"),
    "session_token": ("session_token", "aws_session_token", "token", "aws_token"),
    "endpoint": (
        "endpoint_url_s3",
        "aws_endpoint_url_s3",
        "endpoint",
        "aws_endpoint",
        "endpoint_url",
        "aws_endpoint_url",
    ),
    "region": ("region", "aws_region", "default_region", "aws_default_region"),
    "hosted": ("virtual_hosted_style_request", "aws_virtual_hosted_style_request"),
}
"""What is asked for here, under every name that the library takes for it."""
_USER = re.compile(r"://[^/]*@")


class Unfinished(NamedTuple):
    """One upload that has begun and not ended."""

    path: str
    upload_id: str
    begun_ms: int


class Leftovers:
    """The unfinished uploads of one store."""

    def __init__(self, settings: StoreSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._name = name_of(settings)
        self._bucket, self._prefix = place(settings)
        self._options = service_options(settings.options, os.environ)

    def abort(self, older_than_s: float) -> int:
        """Abort those begun longer ago; how many."""
        credentials = self._credentials()
        if self._settings.backend in ("memory", "azure"):
            return 0
        if credentials is None or "proxy_url" in self._settings.options:
            logger.info("%s: unfinished uploads are left to a lifecycle rule of the bucket", self._name)
            return 0
        before_ms = self._clock.now_ms() - int(older_than_s * 1000)
        found = self._unfinished(credentials)
        stale = [upload for upload in found if upload.begun_ms < before_ms and self._is_ours(upload.path)]
        for upload in stale:
            self._ask("DELETE", upload.path, {"uploadId": upload.upload_id}, credentials, accepted=(200, 204, 404))
        return len(stale)

    def _is_ours(self, path: str) -> bool:
        """Others in the same bucket may have keys that are none of a store like this."""
        below = f"{self._prefix}/" if self._prefix else ""
        return path.startswith(below) and is_key(path.removeprefix(below))

    def _unfinished(self, credentials: Credentials) -> list[Unfinished]:
        try:
            return self._listed(credentials)
        except (ElementTree.ParseError, KeyError, ValueError) as error:
            raise Unavailable(
                f"{self._name} does not list unfinished uploads as S3 does ({error}): give the bucket a lifecycle "
                "rule that aborts them"
            ) from None

    def _listed(self, credentials: Credentials) -> list[Unfinished]:
        found: list[Unfinished] = []
        query = {"uploads": "", **({"prefix": f"{self._prefix}/"} if self._prefix else {})}
        for _ in range(PAGES_MAX):
            page = ElementTree.fromstring(self._ask("GET", "", query, credentials, accepted=(200,)))
            found += [_upload(entry) for entry in page.iter() if _tag(entry) == "Upload"]
            texts = {_tag(entry): entry.text or "" for entry in page}
            if texts.get("IsTruncated") != "true":
                return found
            query |= {"key-marker": texts["NextKeyMarker"], "upload-id-marker": texts["NextUploadIdMarker"]}
        raise Unavailable(f"{self._name} lists more than {PAGES_MAX} pages of unfinished uploads")

    def _credentials(self) -> Credentials | None:
        key, secret = self._options.get("access_key_id"), self._options.get("secret_access_key")
        if self._settings.backend != "s3" or key is None or secret is None:
            return None
        return Credentials(key, secret, self._options.get("session_token"))

    def _ask(
        self, method: str, path: str, query: dict[str, str], credentials: Credentials, *, accepted: tuple[int, ...]
    ) -> bytes:
        region = self._options.get("region", "us-east-1")
        url = bucket_address(self._options, self._bucket) + (f"/{path}" if path else "")
        moment = datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC).strftime("%Y%m%dT%H%M%SZ")
        headers = signed_headers(method, url, query, credentials, region=region, moment=moment)
        try:
            with closing(self._connection(url)) as connection:
                connection.request(method, f"{urlsplit(url).path or '/'}?{query_text(query)}", headers=headers)
                answer = connection.getresponse()
                body = answer.read(ANSWER_BYTES_MAX)
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{self._name} cannot list unfinished uploads ({error}): try again") from error
        if answer.status not in accepted:
            raise Unavailable(f"{self._name} cannot list unfinished uploads (status {answer.status})")
        return body

    def _connection(self, url: str) -> http.client.HTTPConnection:
        parts = urlsplit(url)
        timeout = self._settings.request_timeout_ms / 1000
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.netloc, timeout=timeout)
        return http.client.HTTPSConnection(parts.netloc, timeout=timeout, context=self._trust())

    def _trust(self) -> ssl.SSLContext:
        """Whom the library would trust."""
        certificates = self._settings.options.get("root_certificate")
        context = ssl.create_default_context()
        if certificates is not None:
            context.load_verify_locations(cadata=str(certificates))
        if str(self._settings.options.get("allow_invalid_certificates", "")).lower() == "true":
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context


def service_options(given: Mapping[str, object], variables: Mapping[str, str]) -> dict[str, str]:
    """What the options, or else the service's variables, say; by the names used here."""
    options = {name.lower(): str(value) for name, value in given.items()}
    surroundings = {name.lower(): value for name, value in variables.items() if name.startswith("AWS_") and value}
    found: dict[str, str] = {}
    for name, names in _NAMES.items():
        value = next((held[known] for held in (options, surroundings) for known in names if known in held), None)
        if value is not None:
            found[name] = value
    return found


def bucket_address(options: Mapping[str, str], bucket: str) -> str:
    """Where the bucket is, as the library finds it. An endpoint with the bucket as its host has it already.

    Without a user's part: requests are signed, and no name of a host has one.
    """
    hosted = options.get("hosted", "").lower() == "true"
    if "endpoint" in options:
        return _USER.sub("://", options["endpoint"]).rstrip("/") + ("" if hosted else f"/{bucket}")
    host = f"s3.{options.get('region', 'us-east-1')}.amazonaws.com"
    return f"https://{bucket}.{host}" if hosted else f"https://{host}/{bucket}"


def _upload(entry: ElementTree.Element) -> Unfinished:
    texts = {_tag(field): field.text or "" for field in entry}
    begun = datetime.fromisoformat(texts["Initiated"].replace("Z", "+00:00"))
    return Unfinished(texts["Key"], texts["UploadId"], int(begun.timestamp() * 1000))


def _tag(entry: ElementTree.Element) -> str:
    return entry.tag.rpartition("}")[2]
