"""The window accepts what follows a producer's last append, answers what it remembers, and refuses the rest."""

from __future__ import annotations

from random import Random  # noqa: TID251  # seeded: the same run again

import pytest

from forebay.appends.producer_window import ANY_BEFORE, KEY_IDS, NONE_BEFORE, ROUTER_IDS, ProducerWindow
from forebay.errors import Conflict
from forebay.format.control.frames import WindowEntry
from tests.ledger import Ledger


def _with(*sequences: int) -> ProducerWindow:
    window = ProducerWindow(producers_max=2, appends_max=3)
    window.extend(WindowEntry(7, sequence, 1, 1, 10 * sequence) for sequence in sequences)
    return window


def test_an_append_follows_the_one_it_names() -> None:
    window = _with(3, 8)

    assert window.expect(7, 20, 8, None) is None
    assert window.expect(7, 9, None, None) is None
    assert window.expect(7, 30, 20, 20) is None, "what is on its way counts"
    assert window.expect(8, 20, NONE_BEFORE, None) is None


def test_a_known_sequence_is_answered_whatever_it_names() -> None:
    window = _with(3, 8)

    assert [window.expect(7, 8, previous, None) for previous in (3, None, NONE_BEFORE, ANY_BEFORE, 5)] == [80] * 5
    assert window.expect(7, 3, NONE_BEFORE, None) == 30


@pytest.mark.parametrize(
    ("sequence", "previous", "said"),
    [
        (20, 3, "sent sequence 20 after 3, expected one after 8"),
        (20, 12, "sent sequence 20 after 12, expected one after 8"),
        (20, NONE_BEFORE, "sent sequence 20 after -1, expected one after 8"),
        (20, None, "sent sequence 20, expected 9"),
        (5, 3, "never sent to this partition before sequence 8"),
        (2, ANY_BEFORE, "never sent to this partition before sequence 8"),
    ],
)
def test_what_follows_another_append_is_a_conflict(sequence: int, previous: int | None, said: str) -> None:
    with pytest.raises(Conflict, match=said):
        _with(3, 8).expect(7, sequence, previous, None)


def test_a_producer_that_is_not_known_names_none_before() -> None:
    window = _with()

    for previous in (None, 3):
        with pytest.raises(Conflict, match="names -1 as the previous one"):
            window.expect(7, 20, previous, None)
    assert window.expect(7, 20, NONE_BEFORE, None) is None


def test_a_part_of_a_batch_follows_any_lower_sequence() -> None:
    window = _with(3, 8)

    assert window.expect(7, 20, ANY_BEFORE, None) is None
    assert window.expect(9, 20, ANY_BEFORE, None) is None
    assert window.expect(7, 8, ANY_BEFORE, None) == 80
    with pytest.raises(Conflict):
        window.expect(7, 20, ANY_BEFORE, 30)


_PARTS = ((1, KEY_IDS - 1), (KEY_IDS, ROUTER_IDS - 1), (ROUTER_IDS, 2**64 - 1))
"""First and last ids of clients, of hashed keys and of routers."""


@pytest.mark.parametrize("number", range(3), ids=["clients", "keys", "routers"])
def test_producers_of_one_kind_that_come_and_go_displace_none_of_another(number: int) -> None:
    window = ProducerWindow(producers_max=2, appends_max=3)
    others = [producer for part in (*_PARTS[:number], *_PARTS[number + 1 :]) for producer in part]
    window.extend(WindowEntry(producer, 5, 1, 1, 0) for producer in others)
    first, _ = _PARTS[number]
    window.extend(WindowEntry(producer, 0, 1, 1, 0) for producer in range(first, first + 50))

    assert [window.last_sequence(producer) for producer in others] == [5] * 4
    assert window.producers == 6


def _kind(producer: int) -> int:
    return next(number for number, (first, last) in enumerate(_PARTS) if first <= producer <= last)


class _Model:
    """Every append of each producer, and which producers and appends a window of this size remembers of them."""

    def __init__(self, producers_max: int, appends_max: int) -> None:
        self.limits = producers_max, appends_max
        self.appends: dict[int, list[tuple[int, int, int]]] = {}
        """By producer, longest silent first: sequence, count and offset of each append."""

    def answer(self, producer: int, sequence: int, previous: int | None, count: int) -> int | str:
        found = self.appends.get(producer, [])
        last = found[-1][0] if found else NONE_BEFORE
        for known, size, offset in found[-self.limits[1] :]:
            if known == sequence:
                return offset if size == count else "conflict"
        if previous is None:
            previous = sequence - 1
        return "next" if sequence > last and previous in (last, ANY_BEFORE) else "conflict"

    def add(self, producer: int, sequence: int, count: int, offset: int) -> None:
        self.appends[producer] = [*self.appends.pop(producer, []), (sequence, count, offset)]
        part = [known for known in self.appends if _kind(known) == _kind(producer)]
        for silent in part[: -self.limits[0]]:
            del self.appends[silent]


def _answer(window: ProducerWindow, producer: int, sequence: int, previous: int | None, count: int) -> int | str:
    try:
        found = window.expect(producer, sequence, previous, None, count)
    except Conflict:
        return "conflict"
    return "next" if found is None else found


def _add(window: ProducerWindow, model: _Model, entry: WindowEntry) -> None:
    """Add an append to both; what the window said it would forget is what the model has forgotten."""
    producer, sequence, _, count, offset = entry
    sequences = list(window.sequences_to_forget(producer, [sequence]))
    producers = list(window.producers_to_forget([producer]))
    before = list(model.appends)
    window.add(entry)
    model.add(producer, sequence, count, offset)
    assert sequences == [known for known, _, _ in model.appends[producer]][-5:-4]
    assert producers == [known for known in before if known not in model.appends]


@pytest.mark.parametrize("seed", range(40))
def test_a_window_answers_as_a_model_does_also_after_it_is_restated(seed: int, ledger: Ledger) -> None:
    chance = Random(seed)
    window, model, offset = ProducerWindow(3, 4), _Model(3, 4), 0
    for _ in range(120):
        producer = chance.randrange(1, 5) + chance.choice((0, KEY_IDS, ROUTER_IDS))
        last = window.last_sequence(producer)
        sequence = chance.choice((0, chance.randrange(40), (last or 0) + chance.randrange(1, 5)))
        previous = chance.choice((None, ANY_BEFORE, NONE_BEFORE, last, last, chance.randrange(40)))
        count = chance.choice((1, 1, 2))

        answer = _answer(window, producer, sequence, previous, count)

        assert answer == model.answer(producer, sequence, previous, count), (producer, sequence, previous)
        ledger.count("answers of a window", answer=answer if isinstance(answer, str) else "repeat")
        if answer == "next":
            _add(window, model, WindowEntry(producer, sequence, 1, count, offset))
            offset += count + chance.randrange(2)
        if chance.random() < 0.1:
            restated = ProducerWindow(3, 4)
            restated.extend(window.entries())
            window = restated
