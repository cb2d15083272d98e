"""Who owns a shard: one session at a time, each with a higher epoch than all before.

`OwnerSession` is the session of this process, `acquire` makes it the owner of shards, and an owner records in the
state of a shard how far offsets are reserved. Rests on transactions that compare, never on a clock. Knows what the
metadata store has of a shard, nothing else.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, TypeAlias

import msgspec

from forebay.catalog import StoredState, read_state
from forebay.catalog.transact import Done, Write, transact
from forebay.clock import Clock
from forebay.errors import Conflict, Fenced, Indeterminate, Moved, Unavailable, UnknownTopic
from forebay.format.metadata.descriptor import Phase, ShardState
from forebay.format.metadata.keys import deleted_key, late_key, shard_of_state, state_key
from forebay.format.metadata.value import encode_value
from forebay.locks import Rank, RankedLock
from forebay.metadata import Absent, Compare, MetadataStore, Put, RevisionIs, Session, SessionEnded
from forebay.settings import Settings
from forebay.shard.directories import directory_beside
from forebay.shard.owner_loss import Judgement, TakeOver, is_take_over, judge, with_loss
from forebay.topics import ShardRef

logger = logging.getLogger(__name__)

MayOwn: TypeAlias = Callable[[ShardRef], bool]
"""Whether this process may own a shard: the gate that a log is opened with, asked before each acquisition."""
BATCH_SHARDS = 25
"""Four comparisons each stay below the limit of a transaction."""


def anywhere(ref: ShardRef) -> bool:
    """The gate of a log that was opened without one: it may own every shard."""
    return True


class Owner(NamedTuple):
    """The process that opens shards: its session, and the directory its logs lie in."""

    session: str
    holder: str


def change_state(
    store: MetadataStore,
    shard: Wanted,
    epoch: int,
    change: Callable[[ShardState], ShardState],
    *,
    clock: Clock,
    always: bool = False,
) -> ShardState:
    """Change the state of a shard as its owner in `epoch`; the state on return, which may have been so before.

    With `always` it is written even so: a transaction that was worked out from the state before is refused then.

    Raises `Fenced` once a newer epoch owns the shard, or its topic was deleted: a later one of its name counts epochs
    from the start. An answer that got lost is looked up.
    """
    key = shard.key

    def changed(stored: StoredState | None) -> Write[ShardState] | Done[ShardState]:
        if (
            stored is None
            or stored.state.incarnation != shard.incarnation
            or (stored.state.epoch != epoch and stored.state.phase is Phase.DELETING)
        ):
            why = f"{shard.name}: the topic was deleted: its owner of epoch {epoch} stops"
            raise Fenced(why, shard=shard.name, deleted=True)
        if stored.state.epoch != epoch:
            raise Fenced(f"{shard.name} has a newer owner than epoch {epoch}: this one stops", shard=shard.name)
        state = change(stored.state)
        if state == stored.state and (not always or state.phase is Phase.SEALED):
            return Done(state)
        put = Put(key, encode_value(state, unknown=stored.unknown))
        return Write([RevisionIs(key, stored.revision)], [put], state)

    what = f"{shard.name}: its state is not written"
    return transact(store, lambda: read_state(store, key), changed, what=what, clock=clock)


class Wanted(NamedTuple):
    """A shard to acquire or to change: the key of its state, and the topic id it must belong to.

    `gone` are the keys that say that this topic was deleted: no shard of it is acquired again.
    """

    key: str
    incarnation: str
    gone: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """`namespace/topic[partition]`, for messages."""
        return shard_of_state(self.key)


def wanted(ref: ShardRef, settings: Settings) -> Wanted:
    """What is to be acquired or changed for this shard."""
    spec = ref.spec
    key = state_key(spec.namespace, spec.topic, ref.partition, prefix=settings.metadata.prefix)
    notes = (kind(spec.topic_id, prefix=settings.metadata.prefix) for kind in (deleted_key, late_key))
    return Wanted(key, spec.topic_id, tuple(notes))


class Acquired(NamedTuple):
    """A shard that is ours: its state before (`None` if it had none), and the epoch it has now."""

    before: ShardState | None
    epoch: int


Check: TypeAlias = Callable[[Wanted, ShardState | None], None]
"""Refuses a shard by the state that it has before it is acquired."""


def acquire(
    store: MetadataStore,
    wanted: Sequence[Wanted],
    owner: Owner,
    *,
    clock: Clock,
    take_over: TakeOver = TakeOver.WITH_YES,
    accepted_by: str | None = None,
    check: Check = lambda shard, state: None,
    without_log: Collection[Wanted] = (),
    known: Mapping[str, StoredState] | None = None,
) -> list[Acquired]:
    """Make `owner` the owner of all these shards, each in a new epoch; as few transactions as the limits allow.

    On return no other session can change them. Raises `Moved` if a living session has one, or another directory
    is promised it; `Unavailable` if it is a session of the same directory, whose process may just have died, and if
    one waits for another directory, which has records that history lacks: unless its topic allows the loss, or an
    operator, named by `accepted_by`, does. A loss that is allowed is recorded with the acquisition. With
    `TakeOver.NEVER`, offsets are reserved in the log alone, and no other directory takes over from there: `Conflict`
    if another directory has one that was not sealed and either side does so. A seal that was not finished is thereby
    taken back. What `check` raises comes out, and none of the shards that were looked at with
    that one has changed. Of those in `without_log` the directory has no log: one of an earlier epoch that comes back
    later (a backup) is not the one that goes on. `known` are the states by their keys, if the caller has just read
    them: they are read again only if they have changed since.
    """

    in_log = take_over is TakeOver.NEVER

    def change(shard: Wanted, state: ShardState) -> ShardState:
        return taken(state, owner, reserved_in_log=in_log, is_new_log=shard in without_log)

    def verdict(shard: Wanted, stored: StoredState | None) -> Judgement:
        """What must hold beside the state, so that this shard may be acquired. Raises why it may not."""
        check(shard, stored.state if stored is not None else None)
        if stored is None or not is_take_over(stored.state, owner.holder):
            return Judgement()
        # First: an owner that lives is named as such, whatever it has exported.
        refuse_if_owned(store, shard, stored, owner)
        if in_log or stored.state.reserved_in_log:
            raise _refused_take_over(store, shard, stored.state)
        if take_over is TakeOver.FREELY:
            return Judgement()
        return judge(store, shard.key, stored, owner.holder, accepted_by, clock)

    acquired: list[Acquired] = []
    for first in range(0, len(wanted), BATCH_SHARDS):
        batch = wanted[first : first + BATCH_SHARDS]
        acquired += _acquire_batch(store, batch, owner, verdict, change, known=known, clock=clock)
    return acquired


def give_back(store: MetadataStore, key: str, before: ShardState | None, epoch: int) -> None:
    """An acquisition of which nothing came: as far as can be, the shard has no owner again, with its epoch used.

    Where that is missed, the next opening refuses the shard for the same reason: it was open before, and its offsets
    are as they were.
    """
    with contextlib.suppress(Indeterminate, Unavailable):
        stored = read_state(store, key)
        if before is None or stored is None or stored.state.epoch != epoch:
            return
        if stored.state.incarnation != before.incarnation:
            return
        state = msgspec.structs.replace(before, epoch=epoch, owner=None)
        put = Put(key, encode_value(state, unknown=stored.unknown))
        store.transaction([RevisionIs(key, stored.revision)], [put])


def _acquire_batch(
    store: MetadataStore,
    wanted: Sequence[Wanted],
    owner: Owner,
    verdict: Callable[[Wanted, StoredState | None], Judgement],
    change: Callable[[Wanted, ShardState], ShardState],
    *,
    known: Mapping[str, StoredState] | None,
    clock: Clock,
) -> list[Acquired]:
    seen: list[StoredState | None] = []

    def read() -> list[StoredState | None]:
        # The attempt before was refused: by an owner that lives, or by a deletion?
        for shard, stored in zip(wanted, seen, strict=False):
            refuse_if_owned(store, shard, stored, owner)
            if stored is None and any(store.get(key) is not None for key in shard.gone):
                raise UnknownTopic(f"{shard.name}: the topic was deleted", shard=shard.name)
        look = known.get if known is not None and not seen else partial(read_state, store)
        seen[:] = [_checked(store, shard, look(shard.key), owner) for shard in wanted]
        return seen

    def taking(found: list[StoredState | None]) -> Write[list[Acquired]]:
        verdicts = [verdict(shard, stored) for shard, stored in zip(wanted, found, strict=True)]
        compares: list[Compare] = []
        puts = []
        for shard, stored, allowed in zip(wanted, found, verdicts, strict=True):
            compares += allowed.compares
            compares.append(RevisionIs(shard.key, stored.revision if stored is not None else 0))
            if stored is None:
                compares += [Absent(key) for key in shard.gone]
            if stored is not None and stored.state.owner not in (None, owner.session):
                compares.append(SessionEnded(stored.state.owner or ""))
            state = stored.state if stored is not None else ShardState(incarnation=shard.incarnation)
            unknown = stored.unknown if stored is not None else None
            after = change(shard, state)
            if allowed.loss is not None:
                after = with_loss(after, allowed.loss)
            puts.append(Put(shard.key, encode_value(after, unknown=unknown)))
        # After an answer that was lost this look finds ourselves as the owner, and takes one epoch more: harmless.
        acquired = [Acquired(s.state, s.state.epoch + 1) if s is not None else Acquired(None, 1) for s in found]
        return Write(compares, puts, acquired)

    return transact(store, read, taking, what=f"{wanted[0].name} is not acquired", clock=clock)


def _checked(store: MetadataStore, shard: Wanted, stored: StoredState | None, owner: Owner) -> StoredState | None:
    """The state as found, if `owner` may acquire the shard by it."""
    if stored is not None and stored.state.incarnation != shard.incarnation:
        raise Conflict(f"{shard.name} belongs to another topic of that name: open the topic again", shard=shard.name)
    if stored is not None and stored.state.phase is Phase.DELETING:
        raise UnknownTopic(f"{shard.name}: the topic is being deleted", shard=shard.name)
    if stored is not None and is_promised(stored.state, owner.holder):
        raise Moved(
            f"{shard.name} was sealed at {stored.state.next_offset} and moved to "
            f"{directory_beside(store, shard.key, stored.state.target)}: use it there, or move it back",
            shard=shard.name,
            holder=stored.state.target,
        )
    return stored


def is_promised(state: ShardState, holder: str) -> bool:
    """Whether the shard was given up for another directory than `holder`. A seal half-way has given nothing up."""
    return state.phase is Phase.SEALED and state.target not in (None, holder)


def refuse_if_owned(
    store: MetadataStore,
    shard: Wanted,
    stored: StoredState | None,
    owner: Owner,
    *,
    is_alive: Callable[[str], bool] | None = None,
) -> None:
    """Raise `Moved` or `Unavailable`, as `acquire` does, if another session that is alive has the shard.

    `is_alive` answers for the store's own question, for a caller that asks for many shards.
    """
    is_alive = is_alive if is_alive is not None else store.session_alive
    session = stored.state.owner if stored is not None else None
    if stored is None or session in (None, owner.session) or not is_alive(session or ""):
        return
    if stored.state.holder == owner.holder:
        raise Unavailable(
            f"{shard.name} is owned by the living session {session} of this very directory: if its process has died, "
            "the session ends by itself within metadata.lease_ttl_s; try again then"
        )
    raise Moved(
        f"{shard.name} is owned by the living session {session} in "
        f"{directory_beside(store, shard.key, stored.state.holder)}: use it there, or seal it there first",
        shard=shard.name,
        holder=stored.state.holder,
    )


def _refused_take_over(store: MetadataStore, shard: Wanted, state: ShardState) -> Conflict:
    return Conflict(
        f"{shard.name}: epoch {state.epoch} is held by "
        f"{directory_beside(store, shard.key, state.holder)} and its records lie there: open "
        "that directory, or seal and move the topic from there",
        shard=shard.name,
    )


def taken(state: ShardState, owner: Owner, *, reserved_in_log: bool = False, is_new_log: bool = False) -> ShardState:
    """The state after `owner` acquired the shard; `is_new_log` where its directory has no log to go on in.

    With `reserved_in_log` the owner's log alone will say how far its offsets go.
    """
    epoch = state.epoch + 1
    since = state.holder_since if state.holder == owner.holder and not is_new_log else epoch
    # Until the state records how far they went: see `record_reserved`.
    still_in_log = state.reserved_in_log and state.phase is not Phase.SEALED
    others = state.holders - {owner.holder}
    return msgspec.structs.replace(
        state,
        epoch=epoch,
        owner=owner.session,
        holder=owner.holder,
        holder_since=since,
        phase=Phase.OPEN,
        sealed_by=None,
        sealed_at=None,
        target=None,
        reserved_in_log=reserved_in_log or still_in_log,
        held_before=tuple(sorted(others)) if others else msgspec.UNSET,
    )


class OwnerSession:
    """The session that this process owns shards in, replaced by a new one when it has ended. Safe for concurrent use.

    One thread at a time asks the store for a new session. Threads that need it meanwhile wait, without any lock, and
    share the answer.
    """

    def __init__(
        self,
        metadata: MetadataStore,
        ttl_s: float,
        holder: str,
        on_session: Callable[[str], None] = lambda session: None,
    ) -> None:
        """`on_session` gets the id of each session before it is used; by the thread that asked for it."""
        self.holder = holder
        self._on_session = on_session
        self._metadata = metadata
        self._ttl_s = ttl_s
        self._lock = RankedLock(Rank.LEAF, "shard.session")
        """Protects the fields below. No I/O happens under it."""
        self._session = self._begun()
        self._replaced: list[Session] = []
        """Sessions that have ended in this process, and perhaps not yet for others."""
        self._answer: Future[Session] | None = None
        """What the thread that is asking the store will give the others."""

    @property
    def session(self) -> Session:
        """A session that lives: what was owned in an ended one must be acquired again. Waits for the metadata store."""
        with self._lock:
            if self._session.alive() and not self._replaced:
                return self._session
            answer, is_asked = self._answer, self._answer is not None
            if answer is None:
                answer = self._answer = Future()
        if not is_asked:
            return self._ask(answer)
        try:
            return answer.result(self._ttl_s)
        except TimeoutError:
            # The thread that asks may have been interrupted (Ctrl-C) before it could answer: the next one asks again.
            self._end(answer)
            raise Unavailable(
                f"no new session within {self._ttl_s} seconds: another thread waits for the metadata store; try again"
            ) from None

    def _ask(self, answer: Future[Session]) -> Session:
        try:
            session = self._renewed()
        except BaseException as error:
            self._end(answer)
            interrupted = Unavailable("the thread that asked for a new session was interrupted; try again")
            answer.set_exception(error if isinstance(error, Exception) else interrupted)
            raise
        self._end(answer)
        answer.set_result(session)
        return session

    def _end(self, answer: Future[Session]) -> None:
        with self._lock:
            if self._answer is answer:
                self._answer = None

    def _renewed(self) -> Session:
        """A session that lives, after those that were replaced have ended for every process, as far as can be."""
        before = self._session
        if not before.alive():
            # First: where the store is away, the caller does not wait for the end of the last one as well.
            fresh = self._begun()
            with self._lock:
                if self._session is before:
                    self._session, self._replaced = fresh, [*self._replaced, before]
                else:
                    # A thread that gave up waiting for this one was quicker.
                    self._replaced = [*self._replaced, fresh]
        ended = [session for session in self._replaced if self._has_ended(session)]
        with self._lock:
            self._replaced = [session for session in self._replaced if session not in ended]
            return self._session

    def _begun(self) -> Session:
        session = self._metadata.session(self._ttl_s)
        self._on_session(session.id)
        return session

    def _has_ended(self, session: Session) -> bool:
        """End it for every process: one that was only late would live on, and keep this one from what it owned."""
        try:
            session.close()
        except (Unavailable, Indeterminate) as error:
            logger.warning("session %s is not renewed any more, others see it end later: %s", session.id, error)
            return False
        return True

    @property
    def owner(self) -> Owner:
        """As whom shards are acquired now."""
        return Owner(self.session.id, self.holder)


def reserve_in_state(store: MetadataStore, shard: Wanted, epoch: int, *, clock: Clock) -> Callable[[int], int]:
    """A function that makes a reservation up to an offset durable and returns the offset that is reserved then.

    It raises `Fenced` once a newer epoch owns the shard, and `Unavailable` when the store is out of reach, also where
    the answer to a reservation was lost: no offset above the known one is used, so no append is in doubt by that.
    """

    def reserve(end: int) -> int:
        def raised(state: ShardState) -> ShardState:
            if state.phase is Phase.SEALED:
                # Given up meanwhile: the next owner goes on exactly where the seal ended.
                return state
            return msgspec.structs.replace(state, reserved_end=max(end, state.reserved_end))

        try:
            # Also where so much is reserved already: an export that is under way may be giving it back.
            return change_state(store, shard, epoch, raised, clock=clock, always=True).reserved_end
        except Indeterminate as error:
            raise Unavailable(
                f"{shard.name}: nothing was written, offsets up to {end} may or may not be reserved: {error}",
                shard=shard.name,
            ) from error

    return reserve


def record_reserved(store: MetadataStore, shard: Wanted, epoch: int, end: int, *, clock: Clock) -> None:
    """The log was the only one to know how far its offsets went; on return the state says so, for all below `end`."""

    def recorded(state: ShardState) -> ShardState:
        return msgspec.structs.replace(state, reserved_end=max(end, state.reserved_end), reserved_in_log=False)

    change_state(store, shard, epoch, recorded, clock=clock)


def record_unknown(store: MetadataStore, shard: Wanted, epoch: int, below: int, *, clock: Clock) -> None:
    """Appends of producers below this offset may be unknown; 0 if none are. On return the state says so."""

    def recorded(state: ShardState) -> ShardState:
        return msgspec.structs.replace(state, unknown_below=below or msgspec.UNSET)

    change_state(store, shard, epoch, recorded, clock=clock)
