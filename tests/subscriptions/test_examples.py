"""The examples about subscriptions run, and do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import ordered_projection, poison_records, worker_pool

pytestmark = pytest.mark.slow


def test_a_pool_of_workers_does_every_picture(tmp_path: Path) -> None:
    done = worker_pool.main(str(tmp_path))

    assert set(done) == {b"%d.png" % number for number in range(worker_pool.PICTURES)}


def test_the_bookings_of_an_account_are_applied_in_order(tmp_path: Path) -> None:
    balances = ordered_projection.main(str(tmp_path))

    expected: dict[bytes, int] = {}
    for number in range(ordered_projection.BOOKINGS):
        account = b"account %d" % (number % ordered_projection.ACCOUNTS)
        is_closing = number == ordered_projection.BOOKINGS // 2
        expected[account] = 0 if is_closing else expected.get(account, 0) + number % 10
    assert balances == expected


def test_a_poison_record_is_a_dead_letter_and_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert poison_records.main(str(tmp_path)) == [["Ada", "Grace"], ["unknown"]]
    assert "failed 3 times, last: nack, no field 'customer'" in capsys.readouterr().out
