"""From settings to the library's own store: which options are the service's and which the connection's.

Credentials come from the options, or else from the service's own chain (variables, files, the machine's role).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from forebay.blobs.objects.options import CONNECTION, OPEN
from forebay.blobs.objects.refusals import LIBRARY_ERRORS, text_of
from forebay.blobs.seam import check_key
from forebay.errors import Invalid
from forebay.settings import StoreSettings
from forebay.settings.places import SCHEMES

Library: TypeAlias = AzureStore | GCSStore | MemoryStore | S3Store

_SERVICES: Mapping[str, Any] = {"s3": S3Store, "gcs": GCSStore, "azure": AzureStore}
_ADDRESS = re.compile(r"(?:\w+_)?(?:endpoint|endpoint_url|endpoint_url_s3|base_url)(?<!use_fabric_endpoint)")
_SECRET_LENGTH_MIN = 4
CONNECT_TIMEOUT_MS_MAX = 5_000
BACKOFF_S_FIRST = 0.1
BACKOFF_S_MAX = 5.0


def build(settings: StoreSettings, *, retries: int) -> Library:
    """The library's store, which has made no request yet; `Invalid` names what is wrong with the settings."""
    if settings.backend == "memory":
        return MemoryStore()
    bucket, prefix = place(settings)
    for name, value in settings.options.items():
        if _ADDRESS.fullmatch(name.lower()) and not _is_address(_text(value)):
            raise Invalid(f"store.options.{name} is no address of a service: write it as https://host:port")
    config = {name: _text(value) for name, value in settings.options.items() if name not in CONNECTION}
    connect_ms = min(CONNECT_TIMEOUT_MS_MAX, settings.request_timeout_ms)
    client: dict[str, object] = {
        "timeout": timedelta(milliseconds=settings.request_timeout_ms),
        "connect_timeout": timedelta(milliseconds=connect_ms),
    }
    client |= {name: _text(value) for name, value in settings.options.items() if name in CONNECTION}
    retry = {
        "max_retries": retries,
        "retry_timeout": timedelta(milliseconds=settings.retry_timeout_ms),
        "backoff": {
            "init_backoff": timedelta(seconds=BACKOFF_S_FIRST),
            "max_backoff": timedelta(seconds=BACKOFF_S_MAX),
            "base": 2,
        },
    }
    try:
        store: Library = _SERVICES[settings.backend](
            bucket, prefix=prefix or None, config=config, client_options=client, retry_config=retry
        )
    except (*LIBRARY_ERRORS, TypeError) as error:
        # Not `from error`: the library's long text may repeat the options.
        text = text_of(error, secrets_of(settings))
        raise Invalid(f"store.options do not describe a store on {settings.backend}: {text}") from None
    return store


def _is_address(text: str) -> bool:
    """Whether the library can ask there. It does not say so of one that it cannot: it panics."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return usable and not any(letter.isspace() for letter in text)


def place(settings: StoreSettings) -> tuple[str, str]:
    """Bucket and prefix of `store.root`."""
    bucket, _, prefix = (settings.root or "").partition("/")
    prefix = prefix.strip("/")
    return bucket, check_key(prefix) if prefix else ""


def name_of(settings: StoreSettings) -> str:
    """The store as it is called in messages."""
    if settings.backend == "memory":
        return "memory store"
    return f"{SCHEMES[settings.backend]}://{'/'.join(part for part in place(settings) if part)}"


def secrets_of(settings: StoreSettings) -> tuple[str, ...]:
    """Values that no message may repeat. All but a few well-known ones count as secret."""
    values = (str(value) for name, value in settings.options.items() if name not in OPEN | CONNECTION)
    return tuple(value for value in values if len(value) >= _SECRET_LENGTH_MIN)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
