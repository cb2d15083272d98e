"""What must be recognised as a repeat goes with the task: a machine that writes may have settings of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from forebay.compacting.passes import Unit
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.spark.jobs.compaction import compact
from forebay.spark.place.location import Location
from tests.compacting.directly import AT_ONCE, Here
from tests.spark.mixed import settings_file
from tests.support.environments import directories
from tests.support.environments.directories import TOPIC


class Elsewhere(Here):
    """Executors that remember one producer."""

    def write(self, units: Sequence[Unit]) -> Iterator[SegmentDescriptor | str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SHOP_PRODUCERS", "1")
            return super().write(units)


def test_settings_of_executors_change_nothing_of_what_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_PRODUCERS", "100")
    environment = directories.shared_fs(tmp_path)
    with environment.open("one") as log:
        topic = log.create_topic(TOPIC)
        for producer in (7, 8):
            for sequence in range(2):
                topic.append(b"a", producer=producer, sequence=sequence, partition=0)
            log.export_topic(TOPIC)
        of_each = {"wal.producers_max": "${SHOP_PRODUCERS}"}
        location = Location.parse({"path": f"{tmp_path}/one", "settings": settings_file(environment), **of_each})
        report = compact(Elsewhere(location), location, [TOPIC], rules=AT_ONCE)
        assert report.figures["rewrites"] == 1, report.lines()
        log.seal_topic(TOPIC)

    with environment.open("two") as log:
        topic = log.topic(TOPIC)
        assert [topic.append(b"a", producer=7, sequence=sequence, partition=0) for sequence in range(2)] == [0, 1]
        assert topic.append(b"b", producer=8, sequence=2, partition=0) == 4
