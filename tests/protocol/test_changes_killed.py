"""Kills inside changes of tokens and inside bulk loads: the next life finds each whole or not at all, and goes on."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Final

import pyarrow as pa
import pytest

from forebay import Conflict, Unauthenticated, Unavailable, UnknownLoad
from forebay.bulk import BackfillPlan, LoadBatch, LoadSegment
from forebay.catalog import ShardCatalog, ShardKeys
from forebay.loads.attach import Attached, Attaching
from forebay.loads.forget import named_in
from forebay.loads.prepare import LoadManifest
from forebay.loads.topic import TopicLoads
from forebay.service.tokens import NewToken, TokenBook, Tokens, TokenState, draft_token
from forebay.storage import Storage
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from tests.ledger import Ledger
from tests.protocol.above import values
from tests.protocol.killed import KilledCall, kill_inside

pytestmark = pytest.mark.slow

# Tokens

SEED: Final = 7
DAYS_MS: Final = 86_400_000


def _clock(days: int = 0) -> ManualClock:
    """The same random bytes for each that asks, so that the next life knows which token was made."""
    clock = ManualClock(seed=SEED)
    clock.jump(days * DAYS_MS)
    return clock


def _tokens(log: Storage, days: int = 0) -> Tokens:
    return Tokens(inside(log).metadata, log.settings.metadata.prefix, _clock(days))


def _drafted() -> NewToken:
    return draft_token(_clock(), "anna", scopes=["read"], prefixes=["*"])


def _is_accepted(log: Storage, made: NewToken) -> bool:
    """Whether a broker of this life lets the token's secret in."""
    book = TokenBook(inside(log).metadata, log.settings.metadata.prefix, _clock())
    book.start()
    try:
        return book.principal(made.secret.reveal()).name == made.token.name
    except Unauthenticated:
        return False
    finally:
        book.close()


def _no_tokens(log: Storage) -> None:
    assert _tokens(log).all() == []


def _create_token(log: Storage) -> None:
    _tokens(log).create("anna", scopes=["read"], prefixes=["*"])


def _check_token_made(log: Storage, is_done: bool) -> None:  # noqa: FBT001 - told by the harness
    made = _drafted()
    listed = _tokens(log).all()
    assert listed in ([], [made.token])
    assert listed or not is_done
    assert _is_accepted(log, made) == bool(listed)
    _tokens(log).add(made.token)  # again: there is one, as it was
    assert _tokens(log).all() == [made.token]
    assert _tokens(log).revoke(made.token.token_id).state(0) is TokenState.REVOKED
    assert not _is_accepted(log, made)


def _token_made(log: Storage) -> None:
    _create_token(log)


def _revoke_token(log: Storage) -> None:
    _tokens(log, days=1).revoke(_drafted().token.token_id)


def _check_token_revoked(log: Storage, is_done: bool) -> None:  # noqa: FBT001 - told by the harness
    made = _drafted()
    [listed] = _tokens(log).all()
    assert _is_accepted(log, made) == (listed.revoked_at is None)
    assert listed.revoked_at is not None or not is_done
    revoked = _tokens(log, days=2).revoke(made.token.token_id)
    assert revoked.revoked_at == listed.revoked_at or listed.revoked_at is None, "it was revoked at two times"
    assert not _is_accepted(log, made)
    # Another of the same name takes its place.
    other = Tokens(inside(log).metadata, log.settings.metadata.prefix, ManualClock(seed=8)).create(
        "anna", scopes=["read"], prefixes=["*"]
    )
    assert _is_accepted(log, other)
    assert {token.token_id for token in _tokens(log).all()} == {made.token.token_id, other.token.token_id}


def _tokens_ended(log: Storage) -> None:
    store, prefix = inside(log).metadata, log.settings.metadata.prefix
    for seed in range(3):
        tokens = Tokens(store, prefix, ManualClock(seed=seed))
        tokens.revoke(tokens.create("old", scopes=["read"], prefixes=["*"]).token.token_id)
    _create_token(log)


def _prune_tokens(log: Storage) -> None:
    assert len(_tokens(log, days=40).prune()) == 3


def _check_tokens_pruned(log: Storage, is_done: bool) -> None:  # noqa: FBT001 - told by the harness
    made = _drafted()
    left = [token for token in _tokens(log).all() if token.name == "old"]
    assert not (left and is_done)
    assert all(token.revoked_at is not None for token in left)
    assert len(_tokens(log, days=40).prune()) == len(left)
    assert _tokens(log).all() == [made.token]
    assert _is_accepted(log, made)


# Bulk loads

LOADED: Final = [b"loaded 0", b"loaded 1"]


def _topic(log: Storage) -> None:
    topic = log.create_topic("a", partitions=2, durability="fsync")
    for partition in range(2):
        topic.append(b"first", partition=partition)


def _loads(log: Storage) -> TopicLoads:
    return log.loads_of("a")


def _staged(log: Storage, load_id: str, brought: list[bytes]) -> list[LoadSegment]:
    """One record for each partition."""
    schema = pa.schema([("value", pa.binary())])
    return [
        segment
        for partition, value in enumerate(brought)
        for segment in _loads(log).stage(
            load_id, pa.RecordBatch.from_pydict({"value": [value]}, schema=schema), partition
        )
    ]


def _load(log: Storage, load_id: str = "one", brought: list[bytes] = LOADED) -> None:
    _loads(log).offer(load_id, _staged(log, load_id, brought))
    assert _loads(log).attach(load_id).status == "committed"


def _stands(log: Storage) -> str | None:
    """How far the load is, `None` if it was never offered; of what it brings all is there or nothing."""
    with suppress(UnknownLoad):
        found = _loads(log).get("one")
        seen = [value for value in values(log.topic("a")) if value in LOADED]
        # The background may finish it between the two looks.
        after = _loads(log).get("one").status
        assert sorted(seen) == (LOADED if seen else []), "a part of the load is to be seen"
        assert bool(seen) in (found.status == "committed", after == "committed")
        return after
    assert not set(LOADED) & set(values(log.topic("a")))
    return None


def _goes_on(log: Storage, *loaded: bytes) -> None:
    """The topic has these records of loads, each once, takes appends and loads, and is deleted with all of it."""
    topic = log.topic("a")
    for partition in range(2):
        topic.append(b"last", partition=partition)
    _load(log, "next", [b"next 0", b"next 1"])
    wanted = Counter([*[b"first"] * 2, *loaded, *[b"last"] * 2, b"next 0", b"next 1"])
    assert Counter(values(topic)) == wanted
    for partition in range(2):
        found = [record.value or b"" for record in topic.read(partition=partition, on_gap=lambda *_: None)]
        assert [found[0], *found[-2:]] == [b"first", b"last", b"next %d" % partition]
    log.delete_topic("a")
    again = log.create_topic("a", partitions=2)
    assert _loads(log).page() == ([], None)
    again.append(b"again", partition=0)
    _load(log, "again", [b"again 0", b"again 1"])
    assert Counter(values(again)) == Counter([b"again", b"again 0", b"again 1"])


def _check_loaded(log: Storage, is_done: bool) -> None:  # noqa: FBT001 - told by the harness
    status = _stands(log)
    assert status == "committed" or not is_done
    if status is None:
        _load(log)
    assert _loads(log).attach("one").status == "committed"
    assert [load.load_id for load in _loads(log).page()[0]] == ["one"]
    _goes_on(log, *LOADED)


def _check_loaded_or_given_up(log: Storage, is_done: bool) -> None:  # noqa: FBT001 - told by the harness
    """The next life gives up what was begun and is not committed."""
    status = _stands(log)
    assert status == "committed" or not is_done
    try:
        status = _loads(log).abandon("one").status
    except Conflict:
        status = "committed"
    assert _loads(log).get("one").status == status
    _goes_on(log, *(LOADED if status == "committed" else []))


def _offered(log: Storage) -> None:
    _topic(log)
    # Nothing attaches it meanwhile.
    inside(log).workers.stop()
    _loads(log).offer("one", _staged(log, "one", LOADED))


def _attached_in_part(log: Storage) -> None:
    _offered(log)
    attach = Attaching.attach

    def attach_first(self: Attaching, load_id: str, manifest: LoadManifest) -> Attached | None:
        if self.shard.ref.partition:
            raise Unavailable("not now")
        return attach(self, load_id, manifest)

    with pytest.MonkeyPatch.context() as patched, suppress(Unavailable):
        patched.setattr(Attaching, "attach", attach_first)
        _loads(log).attach("one")
    assert [part.start is None for part in _loads(log).get("one").parts] == [False, True]


def _give_up(log: Storage) -> None:
    assert _loads(log).abandon("one").status == "abandoned"


def _check_given_up(log: Storage, is_done: bool) -> None:  # noqa: FBT001 - told by the harness
    status = _stands(log)
    assert status == "abandoned" or not is_done
    status = _loads(log).attach("one").status
    assert status in ("committed", "abandoned")
    assert [load.status for load in _loads(log).page()[0]] == [status]
    assert ("one" in _named(log)) == (status == "committed"), "gaps stand where it was attached"
    _goes_on(log, *(LOADED if status == "committed" else []))


def _named(log: Storage) -> set[str]:
    """The loads that history names."""
    spec, prefix = log.topic("a").spec, log.settings.metadata.prefix
    keys = [ShardKeys(spec.namespace, spec.topic, partition, prefix) for partition in range(2)]
    catalogs = [ShardCatalog(inside(log).metadata, key, spec.topic_id, clock=_clock()) for key in keys]
    return {load_id for catalog in catalogs for load_id in named_in(catalog)}


PLAN: Final = BackfillPlan(fingerprint="rows", loads=2)
BACKFILLED: Final = [[b"0 of 0", b"1 of 0"], [b"0 of 1", b"1 of 1"]]


def _backfill(log: Storage, attempt: str = "first") -> None:
    """As `forebay history backfill` does it: what the topic has already is left out."""
    loads = _loads(log)
    query_id = loads.begin_backfill("b", PLAN).query_id
    for number, brought in enumerate(BACKFILLED):
        load_id = f"{attempt}-{number}"
        batch = LoadBatch(query_id=query_id, batch_id=number)
        standing = loads.offer(load_id, _staged(log, load_id, brought), batch=batch)
        if standing is not None:
            assert loads.attach(standing.load_id).status == "committed"
    assert loads.backfill("b").done == 2


def _check_backfilled(log: Storage, is_done: bool) -> None:  # noqa: FBT001 - told by the harness
    before = _loads(log).backfill("b").done
    seen = Counter(values(log.topic("a")))
    after = _loads(log).backfill("b").done
    whole = [Counter(value for brought in BACKFILLED[:done] for value in brought) for done in (before, after)]
    assert seen - Counter([b"first"] * 2) in whole, "a part of a load is to be seen"
    assert before == 2 or not is_done
    _backfill(log, "second")
    _goes_on(log, *BACKFILLED[0], *BACKFILLED[1])


CALLS: Final = {
    "create a token": KilledCall(_no_tokens, _create_token, _check_token_made, 1),
    "revoke a token": KilledCall(_token_made, _revoke_token, _check_token_revoked, 1),
    "prune tokens": KilledCall(_tokens_ended, _prune_tokens, _check_tokens_pruned, 1),
    "load": KilledCall(_topic, _load, _check_loaded, 6),
    "load, and then give up": KilledCall(_topic, _load, _check_loaded_or_given_up, 6),
    "give a load up": KilledCall(_offered, _give_up, _check_given_up, 1),
    "give up a load that is attached in part": KilledCall(_attached_in_part, _give_up, _check_given_up, 1),
    "backfill": KilledCall(_topic, _backfill, _check_backfilled, 8),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_kill_inside_a_change_leaves_it_whole_or_not_at_all(name: str, ledger: Ledger) -> None:
    kill_inside(name, CALLS[name], ledger)
