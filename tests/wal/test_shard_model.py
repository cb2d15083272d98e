"""One shard against a plain model: appends of every shape, repeats, upkeep, restarts and crashes in any order."""

from __future__ import annotations

from typing import Any, Final

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from forebay.errors import Conflict
from forebay.testing.checks.history import AppendOutcome
from forebay.testing.checks.invariants import check_log, readings_agree
from forebay.testing.simulated.crashes import crash_states
from forebay.testing.simulated.damage import CrashDamage
from forebay.topics import Durability
from tests.support.soak import SOAK
from tests.wal.rig import Rig, Simulated, simulated, stage

RUNS: Final = 400 if SOAK else 150
STEPS: Final = 40 if SOAK else 25
PRODUCERS: Final = 2


class ShardModel(RuleBasedStateMachine):
    """The model is the history: what was acknowledged must be there, and nothing else but what may be."""

    rig: Simulated

    @initialize(durability=st.sampled_from([Durability.FSYNC, Durability.DISK, Durability.MEMORY]))
    def begin(self, durability: Durability) -> None:
        self.rig = Rig(simulated(), durability).open()
        self.sequences = dict.fromkeys(range(1, PRODUCERS + 1), 0)

    @rule(count=st.integers(1, 6), size=st.sampled_from([0, 0, 40, 700]))
    def append(self, count: int, size: int) -> None:
        assert self.rig.append(count, size=size) is AppendOutcome.ACKED

    @rule(counts=st.lists(st.integers(1, 3), min_size=2, max_size=4))
    def append_together(self, counts: list[int]) -> None:
        assert set(self.rig.group(*counts)) == {AppendOutcome.ACKED}

    @rule(producer=st.integers(1, PRODUCERS))
    def produce(self, producer: int) -> None:
        sequence = self._known(producer)
        # A sequence always stands for the same records, also when a crash took it and it is sent again.
        outcome = self.rig.append(1 + sequence % 2, producing=(producer, sequence))
        assert outcome is AppendOutcome.ACKED
        self.sequences[producer] = sequence + 1

    @rule(producer=st.integers(1, PRODUCERS), back=st.integers(1, 3))
    def repeat(self, producer: int, back: int) -> None:
        last = self._known(producer)
        appends = self.rig.history().appends.values()
        originals = {a.begun.producing: a for a in appends if a.begun.producing and a.outcome is AppendOutcome.ACKED}
        original = originals.get((producer, last - back))
        if original is not None:
            self.rig.append(len(original.begun.values), producing=(producer, last - back))

    @rule(producer=st.integers(1, PRODUCERS), ahead=st.integers(1, 3))
    def skip_a_sequence(self, producer: int, ahead: int) -> None:
        sequence = self._known(producer) + ahead
        try:
            stage(self.rig.wal, [b"never"], (producer, sequence), 0)
        except Conflict:
            return
        raise AssertionError("a sequence out of step was taken")

    @rule()
    def flush(self) -> None:
        self.rig.flush()

    @rule()
    def rotate(self) -> None:
        self.rig.wal.rotate()

    @rule(seconds=st.sampled_from([0.01, 0.5, 2, 400]))
    def let_time_pass(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)
        self.rig.shard.upkeep.maintain()

    @rule(offset=st.integers(0, 60), bytes_max=st.sampled_from([1, 200, 5000]))
    def read_somewhere(self, offset: int, bytes_max: int) -> None:
        whole = dict(self.rig.reading().records)
        page = self.rig.read(offset, bytes_max)
        for batch in page.batches:
            for place, value in enumerate(batch.values()):
                assert whole[batch.base + place] == value
        assert page.next >= offset

    @rule(delta=st.integers(-50, 50))
    def look_up_a_time(self, delta: int) -> None:
        wanted = self.rig.clock.now_ms() + delta
        stamps: list[tuple[int, int]] = []
        offset = 0
        while (page := self.rig.read(offset)).next > offset:
            for batch in page.batches:
                stamps += [(batch.base + place, int(time)) for place, time in enumerate(batch.timestamps())]
            offset = page.next
        expected = next((offset for offset, time in stamps if time >= wanted), None)
        assert self.rig.wal.offset_at_time(wanted) == expected

    @rule()
    def close_and_reopen(self) -> None:
        before = self.rig.reading()
        touched = self.rig.wal.writer.touched
        self.rig.shard.upkeep.close()
        self.rig.open()
        assert self.rig.shard.decision.clean or not touched
        assert list(readings_agree(before, self.rig.reading())) == []

    @rule(data=st.data(), damage=st.sampled_from(list(CrashDamage)))
    def crash(self, data: Any, damage: CrashDamage) -> None:
        trace = self.rig.disk.trace
        states = list(crash_states(trace, damages=(damage,), states_max=6, names_max=3))
        if states:
            state = data.draw(st.sampled_from(states), label="state")
            clock = self.rig.clock
            self.rig = Rig(state.disk(), self.rig.durability, epoch=self.rig.epoch + 1)
            self.rig.clock = clock
            self.rig.open()
            for producer in self.sequences:
                last = self.rig.wal.writer.window.last_sequence(producer)
                self.sequences[producer] = 0 if last is None else last + 1

    @invariant()
    def every_promise_holds(self) -> None:
        if hasattr(self, "rig"):
            assert check_log(self.rig.history(), self.rig.see()) == []

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.shard.upkeep.close()
            last = self.rig.open().reading()
            assert check_log(self.rig.history(), last) == []

    def _known(self, producer: int) -> int:
        """The producer's next sequence."""
        return self.sequences[producer]


TestShardModel = ShardModel.TestCase
TestShardModel.settings = hypothesis.settings(
    max_examples=RUNS,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
