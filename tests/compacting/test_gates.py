"""Compactions, rewritings and bulk loads with a gate in each slow step, and each event that may end what it works for.

A step that reads a segment, puts an object or asks the metadata store stands still while the event happens in another
thread; an event that needs what the step holds waits for it. Afterwards the topic shows what a model says, no object
that history names is missing, and no deleted record is back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa
import pytest

from forebay.blobs import DirectoryStore
from forebay.bulk import LoadSegment
from forebay.clock import SystemClock
from forebay.errors import ForebayError
from forebay.format.columns.rows import encode_rows
from forebay.format.metadata.descriptor import LoadStatus
from forebay.format.metadata.value import encode_value
from forebay.loads.book import LoadBook
from forebay.loads.prepare import LoadPlace, manifest_of, write_segment
from forebay.metadata import Put, RevisionIs
from forebay.metadata.sqlite.store import SqliteMetadata
from forebay.places import Places
from forebay.storage import Storage, Topic
from tests.compacting.directly import AT_ONCE, check_sound, compacted
from tests.ledger import Ledger
from tests.support.environments import directories
from tests.support.environments.directories import Environment, metadata_of
from tests.support.soak import sampled
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.slow

NAME: Final = "shop/orders"
EVENT_SECONDS: Final = 0.3
"""How long a step waits for an event that may need what the step holds."""
GATES_MAX: Final = 30


class Shop:
    """A topic of two partitions with history, and the records that it must show."""

    def __init__(self, root: Path, mode: str) -> None:
        self.environment: Environment = directories.local(root) if mode == "local" else directories.shared_fs(root)
        self.log: Storage = self.environment.open("one")
        self.model: set[tuple[int, bytes]] = set()
        self.is_there = True
        self.load_id: str | None = None
        self.loaded: list[tuple[int, bytes]] = []
        self.erased: tuple[bytes, ...] = ()
        self.fill(partitions=2)

    @property
    def topic(self) -> Topic:
        return self.log.topic(NAME)

    def fill(self, *, partitions: int) -> None:
        """Make the topic, with three pieces of history in each partition and deleted records in them."""
        topic = self.log.create_topic(NAME, partitions=partitions)
        self.model.clear()
        for number in range(3):
            for partition in range(partitions):
                values = [b"%d-%d-%d" % (partition, number, place) for place in range(6)]
                topic.append_many(values, keys=[b"k%d" % (place % 3) for place in range(6)], partition=partition)
                self.model |= {(partition, value) for value in values}
            self.log.export_topic(NAME)
        self.delete(0)

    def delete(self, place: int) -> None:
        """Delete one record of each piece of history."""
        for partition, value in sorted(self.model):
            if value.endswith(b"-%d" % place):
                found = [one.offset for one in self.topic.read(partition=partition) if one.value == value]
                for offset in found:
                    self.topic.delete_by_offset(offset, offset + 1, partition)
                self.model.discard((partition, value))

    def recreate(self) -> None:
        """The topic is deleted, and another one has its name."""
        self.log.delete_topic(NAME)
        self.load_id = None
        self.fill(partitions=2)

    def drop(self) -> None:
        """The topic is deleted."""
        self.log.delete_topic(NAME)
        self.model.clear()
        self.is_there, self.load_id = False, None

    def grow(self) -> None:
        """A partition more, with a record."""
        self.log.alter_topic(NAME, partitions=self.topic.partitions + 1)
        added = self.log.topic(NAME).partitions - 1
        self.log.topic(NAME).append(b"added", partition=added)
        self.model.add((added, b"added"))

    def move(self) -> None:
        """Another epoch: the topic is sealed, and taken back."""
        self.log.seal_topic(NAME)
        self.log.unseal_topic(NAME)
        self.topic.append(b"moved", partition=0)
        self.model.add((0, b"moved"))

    def reopen(self) -> None:
        """The process ends in order, and another one begins."""
        self.log.close()
        self.log = self.environment.open("one")

    def load(self) -> None:
        """A bulk load into both partitions."""
        spec, loads = self.topic.spec, self.log.loads
        load_id, segments = f"load-{len(self.model)}", []
        rows = [(partition, b"loaded-%d-%d" % (partition, place)) for partition in (0, 1) for place in range(3)]
        self.load_id, self.loaded = load_id, rows
        for partition in (0, 1):
            encoded = encode_rows([(value, b"k", None, (), 1) for at, value in rows if at == partition])
            place = LoadPlace(load_id, spec.topic_id, partition)
            made = write_segment(loads.store().store, place, "0-0", [encoded], clock=SystemClock())
            assert made is not None
            segments.append((partition, made))
        loads.offer(NAME, manifest_of(load_id, spec.topic_id, segments), None)
        loads.attach(load_id)

    def stage(self) -> None:
        """The same as callers do it: staged, offered for a time, attached."""
        loads, load_id = self.log.loads_of(NAME), f"staged-{len(self.model)}"
        rows = [(partition, b"staged-%d-%d" % (partition, place)) for partition in (0, 1) for place in range(3)]
        generation = loads.target(load_id).generation
        segments = list[LoadSegment]()
        for partition in (0, 1):
            values = [value for at, value in rows if at == partition]
            segments += loads.stage(load_id, pa.RecordBatch.from_pydict({"value": values}), partition)
        self.load_id, self.loaded = load_id, rows
        loads.offer(load_id, segments, timeout=600.0, generation=generation)
        loads.attach(load_id)
        loads.get(load_id)

    def expire(self) -> None:
        """The time of the load is over, and its owner sees that."""
        book = LoadBook(metadata_of(self.log), self.log.settings.metadata.prefix, SystemClock())
        stored = None if self.load_id is None else book.find(self.load_id)
        if stored is not None and self.load_id is not None and stored.load.status is LoadStatus.OFFERED:
            over = encode_value(msgspec.structs.replace(stored.load, expires_at=1), unknown=stored.unknown)
            at = book.key(self.load_id)
            metadata_of(self.log).transaction([RevisionIs(at, stored.revision)], [Put(at, over)])
        self.log.loads.step()

    def rewrite(self) -> None:
        """A key is erased, and its bytes with it. Of a topic that is made again meanwhile it may be erased or not."""
        self.erased = (b"-1", b"-4")
        self.log.erase_key(NAME, b"k1", now=True)

    def is_erased(self, value: bytes) -> bool:
        """Whether a record is not counted, because its key is being erased."""
        return value.endswith(self.erased)

    def abandon(self) -> None:
        """The load is given up, if it is under way and not committed."""
        if self.load_id is not None:
            self.log.loads.abandon(self.load_id)

    def check(self) -> None:
        """What is shown is what must be, now and for the next process; nothing of history is missing."""
        if self.load_id is not None:
            self._count_load()
        for _ in range(2):
            names = {str(spec.name) for spec in self.log.topics()}
            assert (NAME in names) is self.is_there
            if self.is_there:
                shown = [(record.partition, record.value or b"") for record in self.topic.read()]
                wanted = [record for record in self.model if not self.is_erased(record[1])]
                assert sorted(one for one in shown if not self.is_erased(one[1])) == sorted(wanted)
            self.reopen()
        self.log.close()
        check_sound(self.environment)

    def _count_load(self) -> None:
        """A load counts if it is committed: all of it."""
        assert self.load_id is not None
        # One that was cut short would keep readers before it until an owner finishes it.
        with contextlib.suppress(ForebayError):
            self.log.loads.abandon(self.load_id)
        book = LoadBook(metadata_of(self.log), self.log.settings.metadata.prefix, SystemClock())
        stored = book.find(self.load_id)
        if stored is not None and stored.load.status is LoadStatus.COMMITTED:
            self.model |= set(self.loaded)


WORK: Final[dict[str, Callable[[Shop], object]]] = {
    "compaction": lambda shop: compacted(shop.environment, rules=AT_ONCE),
    "rewriting": lambda shop: shop.rewrite(),
    "load": Shop.load,
    "staged load": Shop.stage,
    "retention": lambda shop: shop.log.run_retention(),
}
EVENTS: Final[dict[str, Callable[[Shop], object]]] = {
    "deleted": Shop.drop,
    "deleted and made again": Shop.recreate,
    "partition added": Shop.grow,
    "moved": Shop.move,
    "records deleted": lambda shop: shop.delete(2),
    "compacted by another": lambda shop: compacted(shop.environment, rules=AT_ONCE),
    "abandoned": Shop.abandon,
    "expired": Shop.expire,
    "attached by another thread": lambda shop: shop.log.loads.step(),
    "closed": lambda shop: shop.log.close(),
}


OF_LOADS: Final = ("abandoned", "expired", "attached by another thread")
"""What happens to loads alone."""


class Gates:
    """Fires an event once, at the n-th slow step of the thread that works."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, event: Callable[[], object]) -> None:
        self._at = at
        self._worker = threading.get_ident()
        self.steps = 0
        self.raised: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(event,))
        for owner, name in (
            (DirectoryStore, "upload"),
            (DirectoryStore, "delete"),
            (Places, "segment"),
            (SqliteMetadata, "transaction"),
        ):
            self._gate(patch, owner, name)

    def _gate(self, patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        whole: Callable[..., object] = getattr(owner, name)

        def gated(*args: object, **kwargs: object) -> object:
            if threading.get_ident() == self._worker:
                self.steps += 1
                if self.steps == self._at:
                    self._thread.start()
                    self._thread.join(EVENT_SECONDS)
            return whole(*args, **kwargs)

        patch.setattr(owner, name, gated)

    def _run(self, event: Callable[[], object]) -> None:
        try:
            event()
        except ForebayError:
            pass  # refused while the other works: nothing was done
        except BaseException as error:  # noqa: BLE001 - shown by the thread of the test
            self.raised.append(error)

    @property
    def is_reached(self) -> bool:
        return self.steps >= self._at

    def end(self) -> None:
        """Wait for the event."""
        if self.is_reached:
            self._thread.join(PATIENCE)
            assert not self._thread.is_alive(), "the event hangs"
        assert self.raised == []


def cases() -> Iterator[tuple[str, str, str]]:
    for mode in ("local", "shared_fs"):
        for work in WORK:
            for event in EVENTS:
                if "load" in work or event not in OF_LOADS:
                    yield mode, work, event


@pytest.mark.parametrize(("mode", "work", "event"), list(sampled(cases(), one_in=5, seed="gates")))
def test_whatever_happens_inside_a_slow_step_history_stays_true(
    mode: str, work: str, event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    for at in sampled(range(1, GATES_MAX), one_in=14, seed=f"{mode} {work} {event}"):
        root = tmp_path / str(at)
        root.mkdir()
        shop = Shop(root, mode)
        with monkeypatch.context() as patch:
            gates = Gates(patch, at, lambda shop=shop: EVENTS[event](shop))  # type: ignore[misc]
            with contextlib.suppress(ForebayError):
                WORK[work](shop)
            gates.end()
        if event == "closed" and gates.is_reached:
            shop.log = shop.environment.open("one")
        shop.check()
        ledger.count("gated steps", work=work, event=event if gates.is_reached else "none")
