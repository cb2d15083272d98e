"""Parts of uploads that never came to their end: S3 keeps, and bills, them until somebody aborts the upload.

The library cannot list them, so two signed requests are made here, which takes an access key in `store.options`.
Where there is none, and for GCS, a lifecycle rule of the bucket does the same; Azure forgets by itself.
"""

from __future__ import annotations

import http.client
import logging
import ssl
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import urlsplit
from xml.etree import ElementTree

from forebay.blobs.objects.building import name_of, place
from forebay.blobs.objects.signing import Credentials, query_text, signed_headers
from forebay.clock import Clock
from forebay.errors import Unavailable
from forebay.settings import StoreSettings

logger = logging.getLogger(__name__)

ANSWER_BYTES_MAX = 16 * 1024 * 1024
PAGES_MAX = 10_000


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

    def abort(self, older_than_s: float) -> int:
        """Abort those begun longer ago; how many."""
        credentials = self._credentials()
        if self._settings.backend in ("memory", "azure"):
            return 0
        if credentials is None:
            logger.info("%s: unfinished uploads are left to a lifecycle rule of the bucket", self._name)
            return 0
        before_ms = self._clock.now_ms() - int(older_than_s * 1000)
        stale = [upload for upload in self._unfinished(credentials) if upload.begun_ms < before_ms]
        for upload in stale:
            self._ask("DELETE", upload.path, {"uploadId": upload.upload_id}, credentials, accepted=(200, 204, 404))
        return len(stale)

    def _unfinished(self, credentials: Credentials) -> list[Unfinished]:
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
        options = {name: str(value) for name, value in self._settings.options.items()}
        key, secret = options.get("access_key_id"), options.get("secret_access_key")
        if self._settings.backend != "s3" or key is None or secret is None:
            return None
        return Credentials(key, secret, options.get("session_token"))

    def _ask(
        self, method: str, path: str, query: dict[str, str], credentials: Credentials, *, accepted: tuple[int, ...]
    ) -> bytes:
        options = self._settings.options
        region = str(options.get("region", "us-east-1"))
        endpoint = str(options.get("endpoint", f"https://s3.{region}.amazonaws.com"))
        hosted = str(options.get("virtual_hosted_style_request", "false")).lower() == "true"
        url = endpoint.rstrip("/") + ("" if hosted else f"/{self._bucket}") + (f"/{path}" if path else "")
        moment = datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC).strftime("%Y%m%dT%H%M%SZ")
        headers = signed_headers(method, url, query, credentials, region=region, moment=moment)
        connection = self._connection(url)
        try:
            connection.request(method, f"{urlsplit(url).path or '/'}?{query_text(query)}", headers=headers)
            answer = connection.getresponse()
            body = answer.read(ANSWER_BYTES_MAX)
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{self._name} cannot tell of unfinished uploads ({error}): try again") from error
        finally:
            connection.close()
        if answer.status not in accepted:
            raise Unavailable(f"{self._name} cannot tell of unfinished uploads (status {answer.status})")
        return body

    def _connection(self, url: str) -> http.client.HTTPConnection:
        parts = urlsplit(url)
        timeout = self._settings.request_timeout_ms / 1000
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.netloc, timeout=timeout)
        return http.client.HTTPSConnection(parts.netloc, timeout=timeout, context=ssl.create_default_context())


def _upload(entry: ElementTree.Element) -> Unfinished:
    texts = {_tag(field): field.text or "" for field in entry}
    begun = datetime.fromisoformat(texts["Initiated"].replace("Z", "+00:00"))
    return Unfinished(texts["Key"], texts["UploadId"], int(begun.timestamp() * 1000))


def _tag(entry: ElementTree.Element) -> str:
    return entry.tag.rpartition("}")[2]
