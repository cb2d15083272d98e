"""What is brought to rest for a fork, what a child abandons, and in which order."""

from __future__ import annotations

import gc
import logging

import pytest

from forebay.disk.forks import Forks


class Handle:
    def __init__(self, name: str, seen: list[str], *, error: BaseException | None = None) -> None:
        self._name = name
        self._seen = seen
        self._error = error

    def abandon(self) -> None:
        self._seen.append(f"abandon {self._name}")


class RestingHandle(Handle):
    def rest(self) -> None:
        self._seen.append(f"rest {self._name}")
        if self._error is not None:
            raise self._error

    def go_on(self) -> None:
        self._seen.append(f"go on {self._name}")


def test_what_uses_another_comes_to_rest_before_it_and_goes_on_after_it() -> None:
    forks, seen = Forks(), list[str]()
    store, user = RestingHandle("store", seen), RestingHandle("user", seen)
    forks.enter(store)
    forks.enter(user)

    forks.before()
    forks.after_in_parent()
    forks.before()
    forks.after_in_child()

    rest = ["rest user", "rest store"]
    assert seen[:4] == [*rest, "go on store", "go on user"]
    assert seen[4:] == [*rest, "abandon store", "go on store", "abandon user", "go on user"]


def test_the_child_abandons_what_need_not_rest_and_has_a_generation_of_its_own() -> None:
    forks, seen = Forks(), list[str]()
    handle = Handle("disk", seen)
    forks.enter(handle)

    forks.before()
    forks.after_in_parent()
    assert (seen, forks.generation) == ([], 0)
    forks.before()
    forks.after_in_child()

    assert (seen, forks.generation) == (["abandon disk"], 1)


@pytest.mark.slow
def test_a_handle_that_is_gone_is_not_called() -> None:
    forks, seen = Forks(), list[str]()
    kept = RestingHandle("kept", seen)
    forks.enter(kept)
    forks.enter(RestingHandle("gone", seen))
    gc.collect()

    forks.before()
    forks.after_in_child()

    assert seen == ["rest kept", "abandon kept", "go on kept"]


@pytest.mark.parametrize("error", [RuntimeError("not ready"), KeyboardInterrupt()])
def test_a_handle_that_fails_or_is_interrupted_stops_no_other(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """Python forks though Ctrl-C came meanwhile; what had come to rest before stayed so, and every later fork hung."""
    forks, seen = Forks(), list[str]()
    first, second = RestingHandle("first", seen), RestingHandle("second", seen, error=error)
    forks.enter(first)
    forks.enter(second)

    with caplog.at_level(logging.ERROR):
        forks.before()
    forks.after_in_parent()

    assert seen == ["rest second", "rest first", "go on first", "go on second"]
    assert "failed at a fork" in caplog.text
    assert not forks.gate.locked()


def test_a_fork_that_is_interrupted_at_the_gate_leaves_everything_going_on() -> None:
    forks, seen = Forks(), list[str]()
    handle = RestingHandle("store", seen)
    forks.enter(handle)
    gate = forks.gate
    for after in (forks.after_in_parent, forks.after_in_child):
        forks.gate = Interrupted()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            forks.before()
        after()
        assert seen[-1] == "go on store"
    assert forks.gate is not gate and not forks.gate.locked()
    forks.enter(handle)


class Interrupted:
    """A gate that another thread holds, while Ctrl-C comes."""

    def acquire(self) -> bool:
        raise KeyboardInterrupt

    def release(self) -> None:
        raise AssertionError("another thread holds it")
