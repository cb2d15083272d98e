"""How many steps of the interpreter a call takes: what it costs, without a clock, whatever else the machine does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def steps_of(call: Callable[[], object]) -> int:
    """How many byte codes this thread runs in a call. Loops inside of numpy and of other compiled code are not seen."""
    steps = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
        nonlocal steps
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return steps
