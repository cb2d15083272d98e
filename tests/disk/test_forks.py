"""Who is told of a fork, and in which order."""

from __future__ import annotations

import gc
import logging

import pytest

from forebay.disk.forks import Forks


class Listener:
    def __init__(self, name: str, told: list[str], *, fails: bool = False) -> None:
        self._name = name
        self._told = told
        self._fails = fails

    def before_fork(self) -> None:
        self._told.append(f"before {self._name}")
        if self._fails:
            raise RuntimeError("not ready")

    def after_fork_in_parent(self) -> None:
        self._told.append(f"parent {self._name}")

    def after_fork_in_child(self) -> None:
        self._told.append(f"child {self._name}")


def test_who_uses_another_comes_to_rest_before_it_and_goes_on_after_it() -> None:
    forks, told = Forks(), list[str]()
    store, user = Listener("store", told), Listener("user", told)
    forks.tell(store)
    forks.tell(user)

    forks.before()
    forks.after_in_parent()
    forks.before()
    forks.after_in_child()

    rest = ["before user", "before store"]
    assert told == [*rest, "parent store", "parent user", *rest, "child store", "child user"]


def test_a_listener_that_is_gone_is_not_told() -> None:
    forks, told = Forks(), list[str]()
    kept = Listener("kept", told)
    forks.tell(kept)
    forks.tell(Listener("gone", told))
    gc.collect()

    forks.before()
    forks.after_in_child()

    assert told == ["before kept", "child kept"]


def test_a_listener_that_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    forks, told = Forks(), list[str]()
    first, second = Listener("first", told), Listener("second", told, fails=True)
    forks.tell(first)
    forks.tell(second)

    with caplog.at_level(logging.ERROR):
        forks.before()
    forks.after_in_parent()

    assert told == ["before second", "before first", "parent first", "parent second"]
    assert "failed to get ready for a fork" in caplog.text
