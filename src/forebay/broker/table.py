"""All routes of the broker, in the order in which they are documented."""

from __future__ import annotations

from forebay.broker import (
    deadletters,
    groups,
    health,
    loads,
    metrics,
    plans,
    records,
    routers,
    status,
    subscriptions,
    topics,
    watch,
)

ROUTES = (
    *topics.ROUTES,
    *records.ROUTES,
    *loads.ROUTES,
    *plans.ROUTES,
    *watch.ROUTES,
    *groups.ROUTES,
    *routers.ROUTES,
    *subscriptions.ROUTES,
    *deadletters.ROUTES,
    *status.ROUTES,
    *health.ROUTES,
    *metrics.ROUTES,
)
