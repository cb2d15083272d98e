"""The route of metrics: everything that the log, the broker and its event loop count, in the format of Prometheus.

Counters are kept where they are counted (`meter`, `Traffic`, `Quotas`, `Guard`); here they get their names. No address,
principal or key of a client is a label; topics are only where `metrics.topics` names them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from forebay.broker.app import Broker, BrokerPhase
from forebay.broker.exchange import HttpAnswer, Request
from forebay.broker.routers import router_metrics
from forebay.broker.routes import NoQuery, Route
from forebay.errors import Corrupt, Unavailable
from forebay.meter import BOUNDS_SECONDS, Durations, MetricKind, Sample
from forebay.routing import RouterStatus
from forebay.service.principals import AccessScope, Principal

logger = logging.getLogger(__name__)


async def get_metrics(broker: Broker, request: Request) -> HttpAnswer:
    """All metrics now; before the log is open those of the broker alone."""
    request.query(NoQuery)
    samples: Iterable[Sample] = ()
    routers: list[RouterStatus] = []
    if broker.phase is BrokerPhase.READY:
        who = broker.authenticated(request)
        samples = (await broker.service.status(who)).metrics
        routers = await _routers(broker, who)
    # What the loop counts is taken here, what the log has counted was taken before: a thread makes lines of both.
    of_broker = [*router_metrics(routers), *_of_broker(broker)]
    text = await broker.compute(partial(_exposition, samples, of_broker))
    return HttpAnswer(200, text, CONTENT_TYPE_LATEST)


async def _routers(broker: Broker, who: Principal) -> list[RouterStatus]:
    """How routers fare. All other numbers are shown although the definitions of routers cannot be read."""
    try:
        return await broker.service.routers.statuses(who)
    except (Unavailable, Corrupt) as error:
        logger.warning("metrics lack those of routers: %s", error)
        return []


def _exposition(samples: Iterable[Sample], of_broker: list[Metric]) -> bytes:
    """All lines of the answer. In a thread: thousands of topics may have lines of their own."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Now([*_of_log(samples), *of_broker]))
    return generate_latest(registry)


class _Now(Collector):
    """What was counted at one moment."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def _of_log(samples: Iterable[Sample]) -> Iterator[Metric]:
    """The numbers of the log, one family for each metric."""
    families: dict[str, Metric] = {}
    labels: dict[str, list[str]] = {}
    found = list(samples)
    for sample in found:
        # Topics have labels of their own: every line of a family has all labels that one of them has.
        known = labels.setdefault(sample.metric.value, [])
        known += [name for name, _ in sample.labels if name not in known]
    for sample in found:
        name = sample.metric.value
        family = families.get(name)
        if family is None:
            family = families[name] = _family(sample, labels[name])
        given = dict(sample.labels)
        values = [given.get(label, "") for label in labels[name]]
        if isinstance(family, HistogramMetricFamily):
            assert isinstance(sample.value, Durations), "a histogram counts durations"
            _add_durations(family, values, sample.value)
        else:
            family.add_metric(values, sample.value)  # type: ignore[attr-defined]
    return iter(families.values())


def _family(sample: Sample, labels: list[str]) -> Metric:
    name, text = sample.metric.value, sample.metric.help
    if sample.metric.kind is MetricKind.HISTOGRAM:
        return HistogramMetricFamily(name, text, labels=labels)
    if sample.metric.kind is MetricKind.COUNTER:
        return CounterMetricFamily(name, text, labels=labels)
    return GaugeMetricFamily(name, text, labels=labels)


def _add_durations(family: HistogramMetricFamily, labels: list[str], durations: Durations) -> None:
    total = 0
    buckets = []
    for bound, count in zip((*map(str, BOUNDS_SECONDS), "+Inf"), durations.counts, strict=True):
        total += count
        buckets.append((bound, total))
    family.add_metric(labels, buckets, durations.sum)


def _of_broker(broker: Broker) -> Iterator[Metric]:
    """The numbers of the broker itself."""
    traffic, counts = broker.traffic, broker.quota_counts()
    requests = CounterMetricFamily(
        "forebay_http_requests_total", "Requests answered, by route and status", labels=["route", "status"]
    )
    for (route, status), number in sorted(traffic.requests.items()):
        requests.add_metric([route, str(status)], number)
    sent = CounterMetricFamily("forebay_http_answer_bytes_total", "Bytes of answers, by route", labels=["route"])
    for route, size in sorted(traffic.sent.items()):
        sent.add_metric([route], size)
    seconds = HistogramMetricFamily("forebay_http_request_seconds", "Time to answer, by route", labels=["route"])
    for route, histogram in sorted(traffic.seconds.items()):
        _add_durations(seconds, [route], histogram.value())
    refused = CounterMetricFamily(
        "forebay_http_refused_total", "Requests refused before they were read, by reason", labels=["reason"]
    )
    for reason, number in sorted({**broker.guard.refused, **counts.refused}.items()):
        refused.add_metric([reason], number)
    yield from (requests, sent, seconds, refused)
    for name, text, value in (
        ("forebay_http_requests_in_flight", "Requests under way", traffic.under_way),
        ("forebay_http_bytes_in_flight", "Bytes of bodies and answers in memory", counts.bytes),
        ("forebay_http_connections", "Connections of clients", broker.guard.connections),
        ("forebay_live_streams", "Live streams open", counts.streams),
        ("forebay_loop_lag_seconds", "How late the event loop came, at most in the last minute", broker.lag.longest()),
        ("forebay_ready", "Whether all routes are served", int(broker.phase is BrokerPhase.READY)),
        ("forebay_replay_progress", "How far the recovery is, from 0 to 1", broker.progress),
        ("forebay_shards_degraded", "Shards that could not be opened", len(broker.degraded)),
        ("forebay_values_unreadable", "Stored values that could not be read", len(broker.unreadable)),
        ("forebay_uptime_seconds", "How long the broker has been serving", broker.uptime_s),
    ):
        yield GaugeMetricFamily(name, text, value=value)


ROUTES = (
    Route(
        method="GET", path="/metrics", name="get_metrics", summary="Metrics in the format of Prometheus",
        handler=get_metrics, scopes=(AccessScope.ADMIN,), answer_media=(CONTENT_TYPE_LATEST,), before_ready=True,
        tag="broker",
    ),
)  # fmt: skip
"""Of metrics."""
