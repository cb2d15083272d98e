"""The answers of `forebay doctor`."""

from __future__ import annotations

import enum
from typing import NamedTuple


class AnswerKind(enum.StrEnum):
    """What an answer means."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


class Answer(NamedTuple):
    """One question answered."""

    check: str
    verdict: AnswerKind
    answer: str
