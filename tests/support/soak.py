"""Whether this is a soak run: the randomised tests then take far more examples (`make soak`)."""

from __future__ import annotations

import os
import random  # noqa: TID251  # seeded: the same sample in every run
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

T = TypeVar("T")

SOAK: Final = bool(os.environ.get("FOREBAY_SOAK"))


def sampled(cases: Iterable[T], *, one_in: int, seed: str) -> Iterator[T]:
    """About one case in so many, the same ones in every run; all of them in a soak run.

    The seed names the search, so that two searches over equal cases, say of two durability classes, take others.
    """
    chance = random.Random(seed)
    for case in cases:
        if chance.randrange(one_in) == 0 or SOAK:
            yield case
