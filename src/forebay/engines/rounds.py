"""Work that nobody waits for, in a thread that exists once it is needed. Ends with whoever made it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from forebay.conditions import Condition
from forebay.engines.background import Background
from forebay.errors import ForebayError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Rounds(Generic[T]):
    """Does one thing for whoever asks, in a thread of its own; who asks twice meanwhile is served once.

    A round begins `seconds` after somebody has asked.
    """

    def __init__(self, name: str, act: Callable[[T], None], seconds: float = 0.0) -> None:
        self.lock = threading.RLock()
        self._name = name
        self._act = act
        self._seconds = seconds
        self._asked = Condition(self.lock)
        self._asking: dict[T, None] = {}
        self._ended = False
        self._thread = Background(name, self._run)

    def ask(self, who: T) -> None:
        """Do it for this one, soon."""
        if who in self._asking:
            return
        with self._asked:
            if not self._ended:
                self._thread.start()
            self._asked.notify()
            # Last: whoever is in here is served, whatever falls in between (Ctrl-C).
            self._asking[who] = None

    def end(self) -> None:
        """Stop the thread; what was asked for and not done yet is left to whoever ends it."""
        with self._asked:
            self._ended = True
            self._asked.notify()
        self._thread.join()

    def abandon(self) -> None:
        """In a forked child: the thread is not there."""
        self._thread.abandon()
        self._ended = True
        self.lock = threading.RLock()
        self._asked = Condition(self.lock)

    def _run(self) -> None:
        while True:
            with self._asked:
                self._asked.wait_for(lambda: self._asking or self._ended)
                if self._seconds:
                    self._asked.wait_for(lambda: self._ended, self._seconds)
                if self._ended:
                    return
                # Taken out before it is done: whoever asks from here on asks for another time.
                asking, self._asking = self._asking, {}
            for who in asking:
                try:
                    self._act(who)
                except ForebayError as error:
                    logger.warning("%s: %s", self._name, error)
                except BaseException:
                    # Whatever it is, as SystemExit of a callback: the thread serves others too, and goes on.
                    logger.exception("%s failed", self._name)
