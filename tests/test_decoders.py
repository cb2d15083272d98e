"""Decoders that several threads ask for at once, the first time a type is used."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from forebay import decoders

_SOURCES = Path(__file__).parents[1] / "src"

# With msgspec's own calls in place of these, this program ends with a segmentation fault after a few rounds.
_RACE = """
import sys, threading
import msgspec
from forebay.decoders import converted, decoder, unpacked

sys.setswitchinterval(1e-6)
VALUE = {"many": {"a": [1]}, "text": "q", "pairs": [[1, {"x": 2, "y": [{"q": 1}]}]], "inner": {"x": 1}}
JSON, PACKED = msgspec.json.encode(VALUE), msgspec.msgpack.encode(VALUE)

def kinds():
    class Inner(msgspec.Struct):
        x: int = 0
        y: list[dict[str, int]] | None = None
    class Outer(msgspec.Struct):
        inner: Inner | None = None
        pairs: list[tuple[int, Inner]] = []
        text: str | None = None
        many: dict[str, list[int]] | None = None
    return Outer

for _ in range(400):
    kind, start = kinds(), threading.Barrier(6)
    ways = [lambda: decoder(kind).decode(JSON), lambda: converted(VALUE, kind), lambda: unpacked(PACKED, kind)]
    found = []
    def use(way):
        start.wait()
        found.append(way())
    threads = [threading.Thread(target=use, args=(way,)) for way in ways * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and all(one == found[0] for one in found)
"""


@pytest.mark.slow
def test_threads_that_use_a_type_for_the_first_time_at_once_do_not_end_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", _RACE], capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_a_process_that_was_forked_while_a_decoder_was_made_makes_its_own() -> None:
    class Fresh(msgspec.Struct):
        x: int

    with decoders.alone():
        child = os.fork()
        if child == 0:
            os._exit(decoders.decoder(Fresh).decode(b'{"x": 7}').x)
        _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 7


@pytest.mark.slow
def test_no_other_module_decodes_into_types_by_itself() -> None:
    typed = {"msgspec.json.Decoder", "msgspec.msgpack.Decoder", "msgspec.convert"}
    untyped = {"msgspec.json.decode", "msgspec.msgpack.decode"}
    found = []
    for path in sorted(_SOURCES.rglob("*.py")):
        if path.name == "decoders.py":
            continue
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        for call in calls:
            name = ast.unparse(call.func)
            has_type = any(keyword.arg == "type" for keyword in call.keywords)
            if name in typed or (name in untyped and has_type):
                found.append(f"{path.relative_to(_SOURCES)}:{call.lineno}: {name}")

    assert found == []
