"""A store that does not keep its promises gets nothing, though no caller could ask it when the process began."""

from __future__ import annotations

import pytest

from forebay.blobs import Capabilities
from forebay.errors import Unsupported
from forebay.testing.checks.history import AppendOutcome
from forebay.testing.simulated.blobs import SimulatedBlobs
from tests.protocol.environment import MODES, OwnersEnvironment


class _Forgetful(SimulatedBlobs):
    """Lets a key be created twice."""

    def probe(self, *, seconds_max: float | None = None) -> Capabilities:
        raise Unsupported("it let the same key be created twice")


@pytest.mark.parametrize("mode", MODES)
def test_a_store_that_lets_a_key_be_created_twice_gets_no_object(mode: str) -> None:
    blobs = _Forgetful()
    environment = OwnersEnvironment(mode, blobs=blobs)
    node = environment.node("a")
    node.append(3)

    for _ in range(2):
        with pytest.raises(Unsupported, match="created twice"):
            node.seal("b")

    assert blobs.contents == {}
    assert node.append() is AppendOutcome.ACKED
    assert node.reading().end == 4
