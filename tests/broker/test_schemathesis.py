"""The OpenAPI document as a judge: requests made from it, right and wrong ones, get only answers that it describes.

The routes of live streams are left out: their answers have no end.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow as pa
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import BaseSchema, Case, GenerationMode, Response
from schemathesis.specs.openapi import checks

from forebay.broker.table import ROUTES
from forebay.bulk import LoadSegment
from forebay.wire import bodies
from forebay.wire.bodies import MediaType
from tests.support.brokers import RunningBroker, running_broker, server_settings
from tests.support.soak import SOAK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

AnyCase: TypeAlias = "Case[Any]"
Step: TypeAlias = tuple[str, bool, GenerationMode, int]
SECONDS: Final = 60
EXAMPLES: Final = 300 if SOAK else 6
"""Requests to each route that the document allows, and as many that it does not."""
WALKS: Final = 250 if SOAK else 10
STEPS: Final = 10
NAMES: Final = {
    label: (f"{label}-1", f"{label}-2") for label in ("topic", "subscription", "consumer", "load", "backfill")
}
"""What the requests of a walk call things: so few names that most of them are of something that is there."""
STORIES: Final = (
    ("put_topic", "append_records", "put_subscription", "get_subscription", "peek_records", "pause_subscription",
     "resume_subscription", "attach_consumer", "pull_records", "ack_records", "list_consumers", "detach_consumer",
     "flush_subscription", "get_lag", "seek_subscription", "list_subscriptions", "delete_subscription"),
    ("put_topic", "put_topic 2", "append_records", "put_subscription", "attach_consumer", "pull_records",
     "nack_records", "pull_records", "list_dead_letters 2", "get_dead_letter 2", "replay_dead_letters 2"),
    ("put_topic", "append_records", "export_topic", "get_plan", "read_object", "read_stored"),
    ("put_topic", "put_topic 2", "stage_rows", "put_load", "attach_load", "get_load", "get_load_target",
     "abandon_load 2", "put_backfill", "get_backfill"),
    ("put_topic", "put_topic 2", "append_records", "copy_topic", "seal_topic", "unseal_topic"),
)  # fmt: skip
"""How a walk may begin: requests that make something, and then use it. A number says which of the names it is about."""
BROKEN_STATUSES: Final = {500, 502}
"""The document names 503, 504 and 507 where they can happen; these never should."""
CHECKS: Final = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
]
WITH_BODY: Final = {route.name for route in ROUTES if route.body is not None}
STEP: Final = st.tuples(
    st.sampled_from([r.name for r in ROUTES if r.path.startswith("/v1/topics/") and not r.is_stream]),
    st.booleans(),
    st.sampled_from(list(GenerationMode)),
    st.sampled_from([0, 0, 0, 1]),
)
"""A request of a walk: the route, whether it makes sense or is drawn, how it is drawn, and which names it uses."""
ROUTE_NAMES: Final = [route.name for route in ROUTES if not route.is_stream and route.name != "get_openapi"]
"""The address that the document was read from is no operation to schemathesis."""
HYPOTHESIS: Final = settings(
    database=None,
    derandomize=True,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@schemathesis.serializer(MediaType.ARROW)
def _as_arrow(context: object, value: object) -> bytes:
    """What is made up for a body of Arrow: bytes as they are, and anything else as text, which is no such stream."""
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    with running_broker(tmp_path_factory.mktemp("broker") / "data", server_settings(wait_timeout_max_ms=20)) as broker:
        yield broker


@pytest.fixture(scope="module")
def schema(broker: RunningBroker) -> BaseSchema:
    found = schemathesis.openapi.from_url(f"{broker.url}/v1/openapi.json")
    found.config.generation.update(with_security_parameters=False)
    return found


def check_answer(case: AnyCase, answer: Response, wanted: Any) -> None:
    """The document describes this answer, and nothing broke."""
    assert answer.status_code not in BROKEN_STATUSES, answer.text
    case.validate_response(answer, checks=wanted)


def may_be_wrong(operation: Any) -> bool:
    """Whether a request can be wrong: it has parameters or a body."""
    return bool(operation.definition.raw.get("parameters") or operation.definition.raw.get("requestBody"))


@pytest.mark.parametrize("name", ROUTE_NAMES)
@pytest.mark.proves("I30")
def test_every_route_answers_as_the_document_says(broker: RunningBroker, schema: BaseSchema, name: str) -> None:
    route = next(route for route in ROUTES if route.name == name)
    operation = schema[route.path][route.method]
    topic = name.replace("_", "-")
    with broker.client() as client:
        assert client.put(f"/v1/topics/shop/{topic}", json={"partitions": 2}).status_code == 201
        client.put("/v1/topics/routed/to")
        client.put("/v1/routers/one", json={"sources": [f"shop/{topic}"], "destination": "routed/to"})
    modes = list(GenerationMode) if may_be_wrong(operation) else [GenerationMode.POSITIVE]
    for mode in modes:

        @settings(HYPOTHESIS, max_examples=EXAMPLES)
        @given(case=operation.as_strategy(generation_mode=mode), is_there=st.booleans())
        def ask(case: AnyCase, is_there: bool) -> None:  # noqa: FBT001 - Hypothesis gives it by name
            if is_there and "topic" in case.path_parameters:
                case.path_parameters.update(namespace="shop", topic=topic)
            if is_there and "router" in case.path_parameters:
                case.path_parameters.update(router="one")
            check_answer(case, case.call(timeout=SECONDS), CHECKS)

        ask()


class Walk:
    """One walk through the routes below a topic: what its requests have made, and what answers have said.

    A walk has a namespace of its own, so that none meets what another has made. Which requests it makes is drawn
    beforehand: an answer fills a later request and never decides what is drawn next. A machine whose steps depend on
    answers draws differently as soon as one answer comes out differently, as one that a busy disk delays, and
    Hypothesis then gives up (`FlakyStrategyDefinition`) without a word about the answer.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.at: dict[str, str] = {}
        """The names in the path of the request that is made."""
        self.topics: dict[str, Any] = {}
        """Those that exist, by name, as the answer to their creation said."""
        self.subscriptions: set[tuple[str, str]] = set()
        self.attached: set[tuple[str, str, str]] = set()
        """Consumers that were attached and were not detached: their session may have ended."""
        self.pulled: dict[str, list[int]] = {}
        self.staged: list[Any] = []
        self.planned: dict[str, Any] = {}
        """Where the first object of the last plan is asked for."""

    def named(self, label: str, chosen: int) -> str:
        """What a part of a path is called here. The ids of loads and backfills are those of the whole broker."""
        if label == "namespace":
            return self.namespace
        name = NAMES[label][chosen]
        return f"{self.namespace}-{name}" if label in ("load", "backfill") else name

    def sensible(self, name: str) -> dict[str, Any]:
        """Query and body of a request to this route that makes sense here."""
        topic_id = self.topics.get(self.at["topic"], {}).get("topic_id", "none")
        no_object = {"partition": 0, "topic_id": topic_id, "store": "s", "key": "k", "start": 0, "stop": 9}
        rows = pa.RecordBatch.from_pydict({"value": [b"a", b"b"]}, schema=pa.schema([("value", pa.binary())]))
        found: dict[str, dict[str, Any]] = {
            "append_records": {"body": [{"value": "v", "key": "k"}]},
            "read_records": {"query": {"start": "earliest"}},
            "delete_records": {"query": {"partition": 0, "before": 1}},
            "find_offset": {"query": {"at": "latest"}},
            "get_sequence": {"query": {"producer": 7, "partition": 0}},
            "copy_topic": {"body": {"target": f"{self.namespace}/{NAMES['topic'][1]}"}},
            "stage_rows": {"body": bodies.encode_arrow([rows]), "media_type": MediaType.ARROW},
            "put_load": {"body": {"segments": self.staged}},
            "put_backfill": {"body": {"fingerprint": "f", "loads": 1}},
            "read_stored": {"query": {"topic_id": topic_id, "start": 0}},
            "read_object": {"query": self.planned or no_object},
            "put_subscription": {"body": {"start": "earliest", "on_spent": "dead_letter", "deliveries_max": 1,
                                          "dead_letter_topic": f"{self.namespace}/{NAMES['topic'][1]}"}},
            "seek_subscription": {"body": {"to": "earliest"}},
            "pull_records": {"body": {"max": 10, "ack": self.pulled}},
            "ack_records": {"body": {"offsets": self.pulled}},
            "nack_records": {"body": {"offsets": self.pulled, "delay_ms": 0}},
            "get_dead_letter": {"query": {"offset": 0}},
            "get_segments": {"query": {"partition": 0}},
        }  # fmt: skip
        wanted = found.get(name, {"body": {}} if name in WITH_BODY else {})
        return {"media_type": MediaType.JSON, **wanted} if "body" in wanted else wanted

    def note(self, name: str, answer: Response) -> None:
        """Take the answer in: it must fit what the walk has made."""
        topic, is_good = self.at["topic"], 200 <= answer.status_code < 300
        place = topic, self.at.get("subscription", "")
        consumer = *place, self.at.get("consumer", "")
        if answer.status_code == 404:
            error = answer.json()["error"]
            named = error["detail"].get("topic")
            assert error["code"] != "unknown_topic" or named not in {f"{self.namespace}/{each}" for each in self.topics}
            assert error["code"] != "unknown_subscription" or place not in self.subscriptions
        if not is_good:
            return
        said: Any = answer.json() if answer.content and "json" in answer.headers["content-type"][0] else None
        if name == "put_topic":
            self.topics[topic] = said
        assert topic in self.topics, "there is no such topic"
        if name == "put_subscription":
            self.subscriptions.add(place)
            namespace, _, letters = (said["dead_letter_topic"] or "/").partition("/")
            if namespace == self.namespace:
                self.topics.setdefault(letters, {})
        if name == "attach_consumer":
            self.attached.add(consumer)
        if "subscription" in self.at and name != "detach_consumer":
            assert place in self.subscriptions, "there is no such subscription"
        if name in ("pull_records", "ack_records", "nack_records"):
            assert consumer in self.attached, "there is no such consumer"
        self._note_content(name, said)
        if name == "detach_consumer":
            self.attached.discard(consumer)
        if name == "delete_subscription":
            self.subscriptions.discard(place)
        if name == "delete_topic":
            del self.topics[topic]
            self.subscriptions = {each for each in self.subscriptions if each[0] != topic}
            self.attached = {each for each in self.attached if each[0] != topic}

    def _note_content(self, name: str, said: Any) -> None:
        if name in ("ack_records", "nack_records"):
            self.pulled = {}
        if name == "pull_records":
            self.pulled = {}
            for each in said["records"]:
                self.pulled.setdefault(str(each["record"]["partition"]), []).append(each["record"]["offset"])
        if name == "stage_rows":
            self.staged = [said]
        if name == "get_plan":
            pieces = [piece[3] for piece in said["partitions"][0].get("history", ()) if piece[3]]
            for piece in [each for each in pieces if each.get("object_key")][:1]:
                where = {"partition": 0, "store": piece["store"], "key": piece["object_key"], "start": 0, "stop": 100}
                self.planned = {**where, "topic_id": piece["topic_id"]}


def test_walks_through_what_requests_have_made_find_what_the_document_says(schema: BaseSchema) -> None:
    """The live stream of a consumer is left out: its answer has no end."""
    routes = {route.name: route for route in ROUTES if route.path.startswith("/v1/topics/") and not route.is_stream}
    operations = {name: schema[route.path][route.method] for name, route in routes.items()}
    drawn = {
        (name, mode): operation.as_strategy(generation_mode=mode)
        for name, operation in operations.items()
        for mode in GenerationMode
    }
    numbers = itertools.count()
    answered: Counter[tuple[str, int]] = Counter()

    def ask(walk: Walk, name: str, case: AnyCase) -> None:
        answer = case.call(timeout=SECONDS)
        if name == "stage_rows" and answer.status_code == 201:
            # schemathesis writes `prefixItems` of an answer in the way of older schemas, and then cannot read it.
            msgspec.json.decode(answer.content, type=LoadSegment)
        else:
            check_answer(case, answer, CHECKS)
        walk.note(name, answer)
        answered[name, answer.status_code] += 1

    @settings(HYPOTHESIS, max_examples=WALKS)
    @given(
        data=st.data(),
        story=st.sampled_from(STORIES),
        told=st.sampled_from([0, 1, 3, 5, *[max(map(len, STORIES))] * 4]),
        steps=st.lists(STEP, min_size=STEPS, max_size=STEPS),
    )
    def go(data: st.DataObject, story: Sequence[str], told: int, steps: Sequence[Step]) -> None:
        walk = Walk(f"walk{next(numbers)}")
        begun = [each.split() for each in story[:told]]
        making = [(name, True, GenerationMode.POSITIVE, len(second)) for name, *second in begun]
        for name, is_sensible, mode, chosen in (*making, *steps):
            walk.at = {label: walk.named(label, chosen) for label in routes[name].labels}
            if is_sensible:
                case = operations[name].Case(path_parameters=dict(walk.at), **walk.sensible(name))
            else:
                case = data.draw(drawn[name, mode])
                case.path_parameters.update(walk.at)
            ask(walk, name, case)

    go()

    good = {name for name, status in answered if 200 <= status < 300}
    assert answered["put_topic", 201] >= WALKS // 2
    assert not SOAK or good == set(routes), f"no walk has got there: {sorted(set(routes) - good)} of {answered}"
