"""What Spark raises, as errors of ours: the same family where it began in Forebay, one line, and the place in the file.

An error of the source or the sink reaches us as text, with the traceback of another process around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from pyspark.errors import AnalysisException, PySparkException, StreamingQueryException
from pyspark.logger import PySparkLogger

from forebay import errors
from forebay.errors import ForebayError, Invalid
from forebay.spark.pipelines.file.document import Flaw, Flawed, Place, Word, flawed, hint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_OURS: Final = re.compile(r"forebay\.errors\.(\w+): ([^\n]*)")
_RAISED: Final = re.compile(r"\[USER_RAISED_EXCEPTION\] ([^\n]*?)(?: SQLSTATE|\n|$)")
"""What a query itself says with raise_error, as we do for values that do not fit."""
_STATE: Final = re.compile(r"\s*SQLSTATE: \w+")
_PLACE: Final = re.compile(r"[;(]?\s*\(?line (\d+),? pos (\d+)\)?")
_CONDITION: Final = re.compile(r"^\s*\[[A-Z_0-9.]+\]\s*")
_CAUSE: Final = re.compile(r"terminated with (?:exception|error)[:\s]*", re.IGNORECASE)
_LAST_LINE: Final = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception)): ([^\n]+)$", re.MULTILINE)
SILENCED: Final = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
TEXT_MAX: Final = 500


def ours_in(error: BaseException) -> ForebayError | None:
    """The error of ours that is behind one of Spark's, if there is one."""
    found = _OURS.findall(str(error))
    if not found:
        return None
    name, text = found[-1]
    family = getattr(errors, name, None)
    if not (isinstance(family, type) and issubclass(family, ForebayError)):
        family = ForebayError
    return family(_STATE.sub("", text).strip())


def text_of(error: BaseException) -> str:
    """What Spark has to say, without its codes, its plans and its stack traces."""
    text = str(error)
    raised = _RAISED.search(text)
    if raised is not None:
        return raised[1].strip()[:TEXT_MAX]
    if isinstance(error, StreamingQueryException):
        text = _CAUSE.split(text, maxsplit=1)[-1]
    lines = _LAST_LINE.findall(text) if "Traceback (most recent call last)" in text else []
    if lines:
        return f"{lines[-1][0]}: {lines[-1][1]}"[:TEXT_MAX]
    text = _PLACE.sub("", _STATE.sub("", text.split("\n\n")[0].split(";\n")[0]))
    return " ".join(_CONDITION.sub("", text).split())[:TEXT_MAX] or type(error).__name__


def failure(error: BaseException, what: str) -> ForebayError:
    """An error of ours that says what failed and why."""
    ours = ours_in(error)
    if ours is not None:
        return ours.restated(f"{what}: {ours}")
    family = Invalid if isinstance(error, AnalysisException) else ForebayError
    return family(f"{what}: {text_of(error)}")


@contextmanager
def errors_at(word: Word | Place, what: str) -> Iterator[None]:
    """Errors of Spark's analysis in the block are raised with the line; inside a text, with the very word."""
    try:
        with quiet():
            yield
    except PySparkException as error:
        ours = ours_in(error)
        place = word if isinstance(word, Place) else word.place
        if ours is not None and not isinstance(ours, Invalid):
            raise ours.restated(f"{place}: {what}: {ours}") from error
        found = _PLACE.search(str(error))
        if found is not None and isinstance(word, Word):
            place = word.place_of(int(found[1]), int(found[2]) + 1)
        raise Flawed(str(Flaw(place, f"{what}: {ours or text_of(error)}"))) from error


def require_column(frame: DataFrame, word: Word, view: Word) -> None:
    """`Flawed` with the line if the rows of a view have no column of this name."""
    if word.lower() not in (name.lower() for name in frame.columns):
        flawed(word.place, f"{view} has no column {word}: {hint(word, frame.columns, 'the columns are')}")


@contextmanager
def quiet() -> Iterator[None]:
    """Spark also logs what it raises, stack and all: not in the block."""
    # Made as Spark makes them: to plain ones it could not log afterwards.
    loggers = [PySparkLogger.getLogger(name) for name in SILENCED]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
