"""I25: no sequence of durable and cached commits moves a cursor back, unless it is reset."""

from __future__ import annotations

import pytest

from tests.storage.cursor_sequences import broken_by_some_sequence


@pytest.mark.proves("I25")
def test_no_sequence_of_commits_moves_a_cursor_back() -> None:
    assert list(broken_by_some_sequence()) == []
