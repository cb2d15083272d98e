"""What stops the event loop of a broker, and for how long: `python -m tests.support.stops FILE serve …`.

The same as `forebay serve …`, with a watch in its loop and a thread beside it. Each stop is a line of the file.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec

from forebay.broker.traffic import LoopLag
from forebay.cli import main

BEAT_SECONDS: Final = 0.005
STOP_SECONDS: Final = 0.02
"""What comes later than this is a stop."""
DEPTH: Final = 6
WAITS: Final = {"wait", "_wait", "wait_for", "acquire", "get", "select", "poll", "_worker"}
"""Functions of threads that have nothing to do."""


class Stop(msgspec.Struct, frozen=True):
    """One time at which the loop came late."""

    at: float
    """When it came, by the monotonic clock of the machine."""
    seconds: float
    loop_cpu: float
    """The processor time of the loop's own thread meanwhile."""
    process_cpu: float
    """That of all threads of the process."""
    collecting: float
    """Seconds in which the garbage collector ran, in any thread: no other runs beside it."""
    stack: str
    """Where the loop was seen most often, innermost last; empty if no look was possible."""
    others: str
    """The same of the other threads, but for those that wait."""

    @property
    def cause(self) -> str:
        """What most of it was spent on."""
        if self.collecting > self.seconds / 2:
            return "garbage collection"
        if self.loop_cpu > self.seconds / 2:
            return f"the loop itself: {self.stack or 'no look was possible'}"
        if self.process_cpu > self.seconds / 2:
            return f"other threads of the process: {self.others or 'no look was possible'}"
        return "the machine: the process did not run"


class LoopWatch:
    """Notes the stops of a loop: `beat` runs in it, and a thread looks where it is while it is late."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._due = time.perf_counter() + 3600
        self._collecting, self._collection_begun = 0.0, 0.0
        self._seen: Counter[str] = Counter()
        self._seen_of_others: Counter[str] = Counter()
        self._loop_thread = 0
        gc.callbacks.append(self._note_collection)

    async def beat(self) -> None:
        """Run until cancelled, in the loop that is watched."""
        self._loop_thread = threading.get_ident()
        threading.Thread(target=self._look, daemon=True).start()
        while True:
            self._collecting = 0.0
            self._seen.clear()
            self._seen_of_others.clear()
            loop_cpu, process_cpu = time.thread_time(), time.process_time()
            self._due = due = time.perf_counter() + BEAT_SECONDS
            await asyncio.sleep(BEAT_SECONDS)
            late = time.perf_counter() - due
            if late >= STOP_SECONDS:
                cpus = (time.thread_time() - loop_cpu, time.process_time() - process_cpu)
                stacks = (_most(self._seen), _most(self._seen_of_others))
                self._keep(Stop(asyncio.get_running_loop().time(), late, *cpus, self._collecting, *stacks))

    def _keep(self, stop: Stop) -> None:
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(stop) + b"\n")

    def _look(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(BEAT_SECONDS)
            if time.perf_counter() - self._due > BEAT_SECONDS:
                frames = sys._current_frames()
                del frames[threading.get_ident()]
                self._seen[_place(frames.pop(self._loop_thread))] += 1
                self._seen_of_others.update(_place(frame) for frame in frames.values() if not _is_waiting(frame))

    def _note_collection(self, phase: str, _about: Mapping[str, Any]) -> None:
        if phase == "start":
            self._collection_begun = time.perf_counter()
        else:
            self._collecting += time.perf_counter() - self._collection_begun


def _most(seen: Counter[str]) -> str:
    return seen.most_common(1)[0][0] if seen else ""


def _is_waiting(frame: FrameType) -> bool:
    return frame.f_code.co_name in WAITS


def _place(frame: FrameType | None) -> str:
    names: list[str] = []
    while frame is not None and len(names) < DEPTH:
        names.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return " > ".join(reversed(names))


def read_stops(path: Path) -> list[Stop]:
    """What a watched broker has left, the longest stop first."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return sorted((msgspec.json.decode(line, type=Stop) for line in lines), key=lambda stop: -stop.seconds)


def _serve(path: Path, words: list[str]) -> int:
    watch, measure = LoopWatch(path), LoopLag.run

    async def run(lag: LoopLag) -> None:
        await asyncio.gather(measure(lag), watch.beat())

    LoopLag.run = run  # type: ignore[method-assign, assignment]
    return main(words)


if __name__ == "__main__":
    sys.exit(_serve(Path(sys.argv[1]), sys.argv[2:]))
