"""A topic that lies in every tier at once, in each mode of storage, and how Spark learns where it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml

from forebay.clock import SystemClock
from forebay.format.columns.rows import encode_rows
from forebay.loads.prepare import LoadPlace, manifest_of, write_segment
from forebay.settings import Settings
from forebay.spark.jobs.compaction import compact
from forebay.spark.place.location import Location
from forebay.storage import Storage
from tests.spark.topics import Filled, Row, in_order
from tests.support.environments.directories import Environment
from tests.support.servers import ACCESS_KEY, SECRET_KEY

TOPIC: Final = "shop/orders"
ENVIRONMENT: Final = {"FOREBAY_TEST_KEY": ACCESS_KEY, "FOREBAY_TEST_SECRET": SECRET_KEY}
"""What the settings file of an object store refers to."""


class Mixed:
    """The topic, the rows that it must show, and the options that lead there."""

    def __init__(
        self, environment: Environment, *, partitions: int = 2, topic: str = TOPIC, log: Storage | None = None
    ) -> None:
        self.environment = environment
        self.log = environment.open("one") if log is None else log
        self.filled = Filled(self.log, topic, partitions=partitions)
        self._deleted: set[tuple[int, int]] = set()
        self.topic = topic

    @property
    def options(self) -> dict[str, str]:
        """By path: everything is seen."""
        return {
            "path": str(self.environment.root / "one"),
            "settings": settings_file(self.environment),
            "topic": self.topic,
        }

    @property
    def rows(self) -> list[Row]:
        """What must be shown."""
        kept = [row for row in self.filled.rows if (row["partition"], row["offset"]) not in self._deleted]
        return in_order(kept)

    def every_tier(self) -> None:
        """A Parquet segment, frames in the store, a bulk load, sealed files, a rotated and the active one.

        With deletes in each, and in the Parquet segment also before it was made.
        """
        partitions = range(self.filled.topic.partitions)
        for count in (1500, 1000):
            for partition in partitions:
                self.filled.many(count, partition)
            self.export()
        for partition in partitions:
            self.delete(partition, 1490, 1510)
        self.compact()
        for partition in partitions:
            self.filled.many(400, partition)
        self.export()
        self.load(300)
        for partition in partitions:
            self.filled.singles(80, partition)
        self.filled.seal()
        for partition in partitions:
            self.filled.many(50, partition)
        self.filled.topic.rotate()
        for partition in partitions:
            self.filled.singles(30, partition)
            self.filled.many(2100, partition, size=10)
        for partition in partitions:
            for start, stop in ((10, 20), (2495, 2510), (2890, 2905), (3150, 3230), (3290, 3310), (3400, 3401)):
                self.delete(partition, start, stop)

    def export(self) -> None:
        """Everything so far becomes history."""
        self.log.export_topic(self.topic)

    def compact(self) -> None:
        """All history so far becomes one Parquet segment."""
        from tests.compacting.directly import AT_ONCE, Here  # noqa: PLC0415 - it builds on this module

        location = Location.parse(self.options)
        report = compact(Here(location), location, [self.topic], rules=AT_ONCE)
        assert not report.findings, report

    def load(self, count: int, partitions: Sequence[int] | None = None) -> None:
        """A bulk load into every partition, or into these."""
        topic, loads = self.filled.topic, self.log.loads
        into = range(topic.partitions) if partitions is None else partitions
        load_id = f"load-{len(self.filled.rows)}"
        segments, rows = [], []
        for partition in into:
            own = [self.filled._row(partition, 40) for _ in range(count)]
            rows += own
            encoded = encode_rows(
                [(row["value"], row["key"], row["tag"], tuple(row["headers"]), row["timestamp"]) for row in own]
            )
            place = LoadPlace(load_id, topic.spec.topic_id, partition)
            made = write_segment(loads.store().store, place, "0-0", [encoded], clock=SystemClock())
            assert made is not None
            segments.append((partition, made))
        loads.offer(self.topic, manifest_of(load_id, topic.spec.topic_id, segments), None)
        loads.attach(load_id)
        starts = {partition: topic.offsets(partition).next - count for partition in into}
        for row in rows:
            self.filled.rows.append({**row, "offset": starts[row["partition"]]})
            starts[row["partition"]] += 1

    def delete(self, partition: int, start: int, stop: int) -> None:
        """These offsets end."""
        self.filled.topic.delete_by_offset(start, stop, partition=partition)
        self._deleted |= {(partition, offset) for offset in range(start, stop)}

    def close(self) -> None:
        self.log.close()


def settings_file(environment: Environment) -> str:
    """The settings of the environment as a file, without secrets."""
    path = environment.root / "forebay.yaml"
    if not path.exists():
        path.write_text(yaml.safe_dump(_tree(environment.settings)))
    return str(path)


def _tree(settings: Settings) -> dict[str, object]:
    """Those groups that say where things are."""
    metadata = settings.metadata
    tree: dict[str, object] = {"metadata": {"path": metadata.path}}
    if metadata.backend == "etcd":
        chosen = {"backend": "etcd", "endpoints": list(metadata.endpoints), "prefix": metadata.prefix}
        tree["metadata"] = {**chosen, "lease_ttl_s": metadata.lease_ttl_s, "lease_margin_s": metadata.lease_margin_s}
    if not settings.is_shared:
        return {**tree, "storage": {"handoff_root": settings.storage.handoff_root}}
    options = dict(settings.store.options)
    if "secret_access_key" in options:
        options |= {"access_key_id": "${FOREBAY_TEST_KEY}", "secret_access_key": "${FOREBAY_TEST_SECRET}"}
    store = {"backend": settings.store.backend, "root": settings.store.root, "options": options}
    return {**tree, "storage": {"mode": settings.storage.mode}, "store": store}


def reopened(environment: Environment, name: str = "one") -> Storage:
    """Another look at a directory, as its owner."""
    return environment.open(name)


def folder_of(path: Path) -> str:
    """A prefix in a bucket that no other test uses."""
    return path.name.replace("_", "-")
