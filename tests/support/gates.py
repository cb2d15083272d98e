"""Gates: a call of the code under test is held inside, while the test lets something else happen."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.waiting import PATIENCE, async_until


@dataclass
class StepGate:
    """Holds the first call that comes to it once it is armed, and lets all others through."""

    armed: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def is_mine(self) -> bool:
        """Whether the call that asks is to be held."""
        if not self.armed.is_set() or self.reached.is_set():
            return False
        self.reached.set()
        return True

    def hold(self) -> None:
        if self.is_mine():
            assert self.released.wait(PATIENCE)

    async def hold_task(self) -> None:
        if self.is_mine():
            await async_until(self.released.is_set)


@dataclass(frozen=True)
class HeldStep:
    """A call of the router's, and whether it is held before it is made or after."""

    owner: Any
    name: str
    when: str

    def __str__(self) -> str:
        return f"{self.when} {self.name}"

    def guard(self, patched: pytest.MonkeyPatch, gate: StepGate) -> None:
        whole: Callable[..., Any] = getattr(self.owner, self.name)

        def held(*arguments: Any, **options: Any) -> Any:
            if self.when == "before":
                gate.hold()
            answer = whole(*arguments, **options)
            if self.when == "after":
                gate.hold()
            return answer

        async def task_held(*arguments: Any, **options: Any) -> Any:
            if self.when == "before":
                await gate.hold_task()
            answer = await whole(*arguments, **options)
            if self.when == "after":
                await gate.hold_task()
            return answer

        patched.setattr(self.owner, self.name, task_held if asyncio.iscoroutinefunction(whole) else held)
