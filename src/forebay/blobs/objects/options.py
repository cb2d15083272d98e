"""What may stand in `store.options`, by whether it may be shown. Knows no library."""

from __future__ import annotations

from typing import Final

CONNECTION: Final = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "randomize_addresses",
        "read_timeout",
        "root_certificate",
        "user_agent",
    }
)
"""How to connect, whatever the service."""
OPEN: Final = frozenset(
    {"endpoint", "region", "default_region", "base_url", "account_name", "bucket", "container_name"}
)
"""Of the service, and no secret. All others count as secret."""
