"""What only the memory engine has to fear."""

from __future__ import annotations

import signal

import pytest

import forebay
from forebay.testing.inside import inside


def test_an_append_by_a_signal_inside_an_append_is_refused_and_no_offset_given_out_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The handler runs in the thread that appends, so the lock lets it in: it must be refused by name."""
    refused: list[str] = []
    with forebay.open(":memory:") as log:
        topic = log.create_topic("t")
        shard = inside(topic).shard(0)
        append = shard._append  # type: ignore[attr-defined]

        def interrupted(*args: object) -> int:
            monkeypatch.setattr(shard, "_append", append)
            signal.raise_signal(signal.SIGUSR1)
            return append(*args)  # type: ignore[no-any-return]

        def answer(number: int, frame: object) -> None:
            with pytest.raises(forebay.Unavailable) as caught:
                topic.append(b"inside")
            refused.append(str(caught.value))

        monkeypatch.setattr(shard, "_append", interrupted)
        before = signal.signal(signal.SIGUSR1, answer)
        try:
            assert topic.append(b"outside") == 0
        finally:
            signal.signal(signal.SIGUSR1, before)

        assert len(refused) == 1
        assert [record.value for record in topic.read()] == [b"outside"]
