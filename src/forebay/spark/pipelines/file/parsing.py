"""A pipeline file turned into a `Pipeline`, or refused with the line of everything that is wrong in it.

Reads the file and the Avro schemas it names. Whether topics and columns exist is found out elsewhere.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

import yaml

from forebay.spark.pipelines.file.document import Fields, Flaws, Word, read_document
from forebay.spark.pipelines.file.model import Mode, Pipeline, Trigger, ViewStep
from forebay.spark.pipelines.kinds import SINKS, SOURCES
from forebay.spark.pipelines.kinds.protocol import Part, PipelineSink, PipelineSource

P = TypeVar("P", bound=Part)

_PIPELINE: Final = ("name", "mode", "trigger", "checkpoint", "location", "spark", "sources", "steps", "sinks")
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")
_OTHER_TRIGGERS: Final = {
    "once": "once takes everything in one batch, however large: write `trigger: availableNow`, which takes several",
    "continuous": "continuous is not offered: write `trigger: {processingTime: 1 second}`",
}


def load_pipeline(path: str) -> Pipeline:
    """The pipeline that a file declares; `Flawed` has a line for each thing that is wrong."""
    flaws = Flaws()
    fields = read_document(path, flaws, what="the pipeline", known=_PIPELINE)
    directory = posixpath.dirname(posixpath.abspath(path))
    name = _name(fields, "revenue")
    mode = fields.choice("mode", {str(mode): mode for mode in Mode}, Mode.BATCH)
    sources = [_source(one, directory) for one in fields.items("sources", "a source", ("name", *_words_of(SOURCES)))]
    steps = [_step(one) for one in fields.items("steps", "a step", ("name", "sql"))]
    sinks = [_sink(one, directory) for one in fields.items("sinks", "a sink", ("name", "from", *_words_of(SINKS)))]
    for kind in ("sources", "sinks"):
        if kind not in fields:
            flaws.add(fields.place, f"{kind} are missing in the pipeline: write `{kind}:` with a list below")
    trigger, checkpoint = _trigger(fields), fields.word("checkpoint")
    _check_mode(fields, mode)
    location, spark = fields.options("location"), fields.options("spark")
    flaws.raise_if_any()
    assert name is not None
    return Pipeline(
        file=path,
        name=name,
        mode=mode,
        sources=tuple(source for source in sources if source is not None),
        steps=tuple(step for step in steps if step is not None),
        sinks=tuple(sink for sink in sinks if sink is not None),
        trigger=trigger,
        checkpoint=checkpoint,
        location=location,
        spark=spark,
    )


def _check_mode(fields: Fields, mode: Mode) -> None:
    if mode is Mode.BATCH:
        for word in ("trigger", "checkpoint"):
            if word in fields:
                fields.flaws.add(
                    fields.place_of(word),
                    f"{word} belongs to a streaming pipeline: write `mode: streaming`, or leave it out",
                )
    elif "checkpoint" not in fields:
        fields.flaws.add(
            fields.place_of("mode"),
            "checkpoint is missing: a streaming pipeline keeps there how far it came; write `checkpoint: DIRECTORY`",
        )


def _name(fields: Fields, example: str) -> Word | None:
    name = fields.required("name", example)
    if name is not None and not _NAME.fullmatch(name):
        fields.flaws.add(
            name.place, f"name of {fields.what} is {str(name)!r:.80}: write a letter, then letters, digits and _"
        )
    return name


def _named(fields: Fields, kind: str, example: str) -> Word | None:
    """The name of a part, by which errors in it are reported."""
    name = _name(fields, example)
    if name is not None:
        fields.what = f"{kind} {name}"
    return name


def _trigger(fields: Fields) -> Trigger:
    node = fields.node("trigger")
    if node is None:
        return Trigger()
    if isinstance(node, yaml.ScalarNode):
        word = fields.word("trigger")
        if word == "availableNow":
            return Trigger(available_now=True)
        if word is not None:
            fields.flaws.add(word.place, _wrong_trigger(word))
        return Trigger()
    known = ("availableNow", "processingTime", *_OTHER_TRIGGERS)
    inner = fields.mapping("trigger", "trigger", known)
    assert inner is not None
    for other, way_out in _OTHER_TRIGGERS.items():
        if other in inner:
            fields.flaws.add(inner.place_of(other), way_out)
    if "availableNow" in inner and "processingTime" in inner:
        fields.flaws.add(
            inner.place_of("processingTime"), "availableNow and processingTime exclude each other: give one"
        )
    interval = inner.duration("processingTime")
    now = inner.truth("availableNow", default=False)
    return Trigger(available_now=now, interval=interval)


def _wrong_trigger(word: Word) -> str:
    if word in _OTHER_TRIGGERS:
        return _OTHER_TRIGGERS[word]
    return f"trigger is {str(word)!r:.80}: write `availableNow` or `{{processingTime: 10 seconds}}`"


def _words_of(kinds: Iterable[type[Part]]) -> tuple[str, ...]:
    """Every word that a part of one of these kinds may have."""
    return tuple(dict.fromkeys(word for kind in kinds for word in (*kind.words, *kind.fields)))


def _source(fields: Fields, directory: str) -> PipelineSource | None:
    name = _named(fields, "source", "orders")
    chosen = _kind(fields, SOURCES, "reads")
    if chosen is None:
        return None
    kind, word = chosen
    found = kind.parse(fields, name if name is not None else Word("", fields.place), word, directory)
    return found if name is not None else None


def _step(fields: Fields) -> ViewStep | None:
    name, sql = _named(fields, "step", "revenue"), fields.required("sql", "SELECT …")
    return ViewStep(name=name, sql=sql) if name is not None and sql is not None else None


def _sink(fields: Fields, directory: str) -> PipelineSink | None:
    name, view = _named(fields, "sink", "revenue_topic"), fields.required("from", "a source or a step")
    chosen = _kind(fields, SINKS, "writes")
    if chosen is None:
        return None
    kind, word = chosen
    target = fields.word(word)
    if name is None or view is None or target is None:
        return None
    return kind.parse(fields, name, view, target, directory)


def _kind(fields: Fields, kinds: Sequence[type[P]], does: str) -> tuple[type[P], str] | None:
    """The kind that the words of a part make it, and the word that does; what goes with another kind is a flaw."""
    known = tuple(dict.fromkeys(word for kind in kinds for word in kind.words))
    given = [word for word in known if word in fields]
    if len(given) != 1:
        said = f"has {' and '.join(given)}" if given else f"says nothing of where it {does}"
        fields.flaws.add(fields.place, f"{fields.what} {said}: give one of {', '.join(known)}")
        return None
    by_format = {kind.format_word: kind for kind in kinds if given[0] in kind.words}
    chosen = by_format.get(None)
    with_it = given[0]
    if chosen is None:
        first, known_formats = next(iter(by_format.values())), {str(name): kind for name, kind in by_format.items()}
        chosen = fields.choice("format", known_formats, first)
        if not fields.is_one_of("format", known_formats):
            # What goes with it cannot be said.
            return None
        with_it = f"format {chosen.format_word}"
    for word in _words_of((*SOURCES, *SINKS)):
        if word in fields and word not in (*given, *chosen.fields):
            fields.flaws.add(fields.place_of(word), f"{word} does not go with {with_it} in {fields.what}")
    return chosen, given[0]
