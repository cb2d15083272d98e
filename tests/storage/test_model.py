"""Any order of creating, deleting, appending, rotating and reopening: what a plain list would say, the log says."""

from __future__ import annotations

import tempfile
from typing import TypeAlias

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis import settings as effort

import forebay
from forebay import Conflict, Storage, UnknownTopic
from tests.storage.rig import quick, values

Step: TypeAlias = tuple[str, str, object]

SETTINGS = quick(rotate_bytes_max=4096, cache_bytes_max=1024, reserve_records_min=3, frame_bytes_max=65_536)
NAMES = st.sampled_from(["a", "b/c"])
VALUES = st.lists(st.none() | st.binary(max_size=300), min_size=1, max_size=12)
STEPS = st.one_of(
    st.tuples(st.just("create"), NAMES, st.sampled_from(["memory", "disk", "fsync"])),
    st.tuples(st.just("delete"), NAMES, st.none()),
    st.tuples(st.just("one"), NAMES, VALUES),
    st.tuples(st.just("many"), NAMES, VALUES),
    st.tuples(st.just("nowait"), NAMES, VALUES),
    st.tuples(st.just("rotate"), NAMES, st.none()),
    st.tuples(st.just("flush"), NAMES, st.none()),
    st.tuples(st.just("reopen"), NAMES, st.none()),
)


class Model:
    """Lists of values by topic, beside a log that should hold the same."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.log: Storage = Storage.open(path, SETTINGS)
        self.held: dict[str, list[bytes | None]] = {}

    def step(self, kind: str, name: str, what: object) -> None:
        if kind == "reopen":
            self.log.close()
            self.log = Storage.open(self.path, SETTINGS)
        elif kind == "create":
            try:
                self.log.create_topic(name, durability=str(what))
                assert name not in self.held
                self.held[name] = []
            except Conflict:
                assert name in self.held
        else:
            try:
                self._change(kind, name, what)
            except UnknownTopic:
                assert name not in self.held

    def _change(self, kind: str, name: str, what: object) -> None:
        if kind == "delete":
            self.log.delete_topic(name)
            del self.held[name]
            return
        topic = self.log.topic(name)
        held = self.held[name]
        first = len(held)
        if kind in ("one", "many", "nowait"):
            assert isinstance(what, list)
            offsets = self._append(topic, kind, what)
            assert offsets == list(range(first, first + len(what)))
            held += what
        elif kind == "rotate":
            topic.rotate()
        else:
            topic.flush()
            assert topic.offsets().durable == len(held)

    def _append(self, topic: forebay.Topic, kind: str, what: list[bytes | None]) -> list[int]:
        if kind == "one":
            return [topic.append(value) for value in what]
        if kind == "many":
            return list(topic.append_many(what))
        return [ack.result(60) for ack in [topic.append_nowait(value) for value in what]]

    def check(self) -> None:
        assert sorted(str(spec.name) for spec in self.log.topics()) == sorted(
            name if "/" in name else f"default/{name}" for name in self.held
        )
        for name, held in self.held.items():
            topic = self.log.topic(name)
            assert values(topic.read()) == held
            assert values(topic.follow(len(held) // 2, timeout=0)) == held[len(held) // 2 :]
            assert [value for batch in topic.read_arrow() for value in batch.column("value").to_pylist()] == held


@given(script=st.lists(STEPS, max_size=25))
@effort(max_examples=30)
@pytest.mark.proves("I6", "I8")
def test_the_log_says_what_a_list_would_say(script: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as root:
        model = Model(f"{root}/log")
        try:
            for kind, name, what in script:
                model.step(kind, name, what)
            model.check()
            model.step("reopen", "", None)
            model.check()
        finally:
            model.log.close()
