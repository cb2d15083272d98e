"""Signals wait for the append that is under way, and a second one does not."""

from __future__ import annotations

import signal

import pytest

from forebay.cli.interruptions import Interrupted, Interruptions


def test_a_signal_raises_at_once_where_nothing_is_held() -> None:
    with Interruptions().heeded(), pytest.raises(Interrupted) as raised:
        signal.raise_signal(signal.SIGTERM)

    assert raised.value.exit_code == 143


def test_a_signal_waits_for_what_is_held() -> None:
    steps = []

    with Interruptions().heeded() as interruptions, pytest.raises(Interrupted) as raised:
        with interruptions.held():
            signal.raise_signal(signal.SIGINT)
            steps.append("finished")
        steps.append("never")

    assert steps == ["finished"] and raised.value.exit_code == 130


def test_a_second_signal_does_not_wait() -> None:
    with Interruptions().heeded() as interruptions, pytest.raises(Interrupted), interruptions.held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it waited")


def test_an_error_inside_is_not_hidden_by_a_signal() -> None:
    with Interruptions().heeded() as interruptions, pytest.raises(ValueError, match="inside"), interruptions.held():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("inside")


def test_signals_are_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    with Interruptions().heeded():
        pass

    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
