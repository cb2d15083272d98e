"""Deliberate breaks of subscriptions: what ends while a step waits must be seen by the schedules with gates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import pytest

from forebay import progress
from forebay.storage.subscriptions import SubscriptionDriver
from forebay.subscriptions.dispatch import Dispatch, ServedPartition, WantedPage
from forebay.subscriptions.window import Taken, Window, WindowLimits
from tests.ledger import Ledger
from tests.subscriptions.simulated import BrokenPromise
from tests.subscriptions.test_gated_schedules import run_schedules

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far more than needed: a shared machine may be busy

SCHEDULES_MAX: Final = 400


class Mutant(NamedTuple):
    """A break, and the mode and `on_spent` of schedules that must notice it."""

    install: Callable[[pytest.MonkeyPatch], None]
    mode: str = "exclusive"
    on_spent: str | None = None


def _by_number(patch: pytest.MonkeyPatch) -> None:
    """A page is offered to the window that serves the partition now, wherever that ends."""
    offer = Dispatch.offer

    def offer_by_number(dispatch: Dispatch, wanted: WantedPage, *args: Any) -> None:
        served = dispatch.partitions.get(wanted.served.number)
        if served is not None:
            offer(dispatch, WantedPage(served, served.window.end), *args)

    patch.setattr(Dispatch, "offer", offer_by_number)


def _from_an_earlier_window(patch: pytest.MonkeyPatch) -> None:
    """The first window of a partition is asked where the subscription stands, also after it was replaced."""
    note, first = Dispatch.note, dict[tuple[Dispatch, int], ServedPartition]()

    def note_first(dispatch: Dispatch, partitions: Iterable[int], mark: Callable[[ServedPartition], bool]) -> bool:
        return note(dispatch, partitions, lambda served: mark(first.setdefault((dispatch, served.number), served)))

    patch.setattr(Dispatch, "note", note_first)


def _uncounted(patch: pytest.MonkeyPatch) -> None:
    """Deliveries are not stored before they are made."""
    patch.setattr(SubscriptionDriver, "flush", lambda _: None)


def _counted_on_the_way(patch: pytest.MonkeyPatch) -> None:
    """What is on its way counts as delivered from the moment on in which it is claimed."""
    take = Window.take

    def take_delivered(window: Window, consumer: int, count: int, now: int) -> Taken:
        taken = take(window, consumer, count, now)
        window.hand_over(consumer, taken.offsets, taken.attempts, now)
        return taken

    patch.setattr(Window, "take", take_delivered)


def _of_any_subscription(patch: pytest.MonkeyPatch) -> None:
    """The cursor of a subscription is moved for one that was deleted."""
    patch.setattr(progress, "is_same_subscription", lambda stands, wanted: True)


def _left_windows(patch: pytest.MonkeyPatch) -> None:
    """Windows of consumers that were dropped, or whose take goes on, are served on."""
    patch.setattr(SubscriptionDriver, "_end_left", lambda _: None)
    patch.setattr(Dispatch, "check_attached", lambda _, consumer: None)


MUTANTS: Final = {
    "a page is offered to a window by the number of the partition": Mutant(_by_number),
    "a cursor is stored from an earlier window": Mutant(_from_an_earlier_window),
    "deliveries are not stored before they are made": Mutant(_uncounted),
    "what is on its way counts as delivered": Mutant(_counted_on_the_way, "shared", "drop"),
    "a cursor is moved for a subscription that was deleted": Mutant(_of_any_subscription),
    "windows without consumers are served on": Mutant(_left_windows),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_break_of_a_subscription_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch, ledger: Ledger) -> None:
    mutant = MUTANTS[name]
    mutant.install(monkeypatch)

    with pytest.raises(BrokenPromise):
        run_schedules(monkeypatch, mutant.mode, mutant.on_spent, SCHEDULES_MAX)

    ledger.count("mutants caught")


def test_a_page_that_is_taken_in_wherever_the_window_ends_is_noticed(
    monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    """As the tests of the window notice it: the offsets before the page count as done."""
    offer = Window.offer
    monkeypatch.setattr(Window, "offer", lambda window, _start, *args: offer(window, window.end, *args))
    window = Window(0, WindowLimits())

    window.offer(100, [(100, 110)], 110)

    assert window.cursor == 100, "the break does not break anything"
    ledger.count("mutants caught")
