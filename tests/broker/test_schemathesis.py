"""The OpenAPI document as a judge: requests made from it, right and wrong ones, get only answers that it describes.

The route of live streams is left out: its answer has no end.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import BaseSchema, Case, GenerationMode, Response
from schemathesis.specs.openapi import checks

from forebay.broker.table import ROUTES
from forebay.wire.bodies import MediaType
from tests.support.brokers import RunningBroker, running_broker, server_settings
from tests.support.soak import SOAK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

AnyCase: TypeAlias = "Case[Any]"
SECONDS: Final = 60
EXAMPLES: Final = 300 if SOAK else 6
"""Requests to each route that the document allows, and as many that it does not."""
WALKS: Final = 500 if SOAK else 10
STEPS: Final = 6
BROKEN_STATUSES: Final = {500, 502}
"""The document names 503, 504 and 507 where they can happen; these never should."""
CHECKS: Final = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
]
WALK_CHECKS: Final = [*CHECKS, checks.use_after_free, checks.ensure_resource_availability]
ROUTE_NAMES: Final = [route.name for route in ROUTES if not route.is_stream and route.name != "get_openapi"]
"""The address that the document was read from is no operation to schemathesis."""
HYPOTHESIS: Final = settings(
    database=None,
    derandomize=True,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    stateful_step_count=STEPS,
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


def test_walks_along_the_links_of_the_document_find_what_it_says(schema: BaseSchema) -> None:
    # Topics and their records: with the many routes of subscriptions and loads, few walks would make a topic.
    apart = "/(subscriptions|deadletters|loads|backfills|plan|stored|object)"
    schema = schema.include(path_regex="^/v1/topics/").exclude(operation_id="copy_topic").exclude(path_regex=apart)
    numbers = itertools.count()
    seen: Counter[str] = Counter()

    class Walk(schema.as_state_machine()):  # type: ignore[misc]
        """Every walk has a namespace of its own, so that none meets the topics of another."""

        def setup(self) -> None:
            self.namespace = f"walk{next(numbers)}"

        def before_call(self, case: AnyCase) -> None:
            case.path_parameters["namespace"] = self.namespace

        def get_call_kwargs(self, case: AnyCase) -> dict[str, Any]:
            return {"timeout": SECONDS}

        def validate_response(self, response: Response, case: AnyCase, *_: Any, **__: Any) -> None:
            seen[f"{case.operation.definition.raw['operationId']} {response.status_code}"] += 1
            check_answer(case, response, WALK_CHECKS)

    Walk.run(settings=settings(HYPOTHESIS, max_examples=WALKS))

    assert seen["put_topic 201"] >= WALKS // 2
    assert sum(seen.values()) >= 2 * WALKS
