"""The segment engine: each shard is a log of segment files in a directory of its own, with history behind it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from forebay.catalog import ShardCatalog, StoredState, decode_state, read_state
from forebay.cleanup.moved_shards import clear_away, drop_history, remove_files
from forebay.clock import Clock
from forebay.disk import Disk, make_directories
from forebay.engines.registry import ShardedEngine
from forebay.engines.seam import OwnedShard
from forebay.errors import (
    Conflict,
    Corrupt,
    DataLoss,
    Fenced,
    ForebayError,
    Moved,
    Unavailable,
    UnknownTopic,
    Unsupported,
)
from forebay.format.metadata.descriptor import Phase, ShardState
from forebay.metadata import Entry, MetadataStore, Session
from forebay.places import Places
from forebay.settings import Settings
from forebay.shard import SegmentShard, ShardContext, acquire
from forebay.shard.owner_loss import TakeOver, is_take_over, judge
from forebay.shard.ownership import (
    BATCH_SHARDS,
    Acquired,
    Owner,
    OwnerSession,
    give_back,
    is_promised,
    record_unknown,
    refuse_if_owned,
    wanted,
)
from forebay.shard.recovery import refuse_contradiction, refuse_lost_directory
from forebay.shard.seal import ClosedShard, OnFile, begin_seal, end_reservations, export_tails, finish_seal
from forebay.topics import ShardRef, TopicSpec
from forebay.wal.bounds import MemoryBounds
from forebay.wal.recovery.survey import has_log, survey, tail_bytes
from forebay.wal.writer import Writer

logger = logging.getLogger(__name__)

_Check: TypeAlias = Callable[[ShardRef, ShardState | None], None]


class Acquisition(NamedTuple):
    """What became of a shard that was to be acquired together with others."""

    ref: ShardRef
    opening: Callable[[ShardRef, Callable[[int], None]], OwnedShard] | None = None
    """Opens the shard, which is this directory's, by a definition; its second argument gets counts of bytes walked."""
    tail_bytes: int = 0
    """About how many bytes that walks."""
    error: ForebayError | OSError | None = None
    """Why the shard, which is this directory's, cannot be opened. Neither: it is not, or it is open."""


def _is_to_record(writer: Writer) -> bool:
    """Whether the recorded state says something else of where a log ends, which was closed in order."""
    return writer.touched or writer.reserved_end > writer.next


class SegmentEngine(ShardedEngine[SegmentShard]):
    """Shards below the directory `shards`, owned by this process."""

    def __init__(
        self,
        shards: str,
        settings: Settings,
        *,
        disk: Disk,
        clock: Clock,
        metadata: MetadataStore,
        owner_session: OwnerSession,
        places: Places,
        on_open: Callable[[SegmentShard], None],
        on_dirty: Callable[[str], None],
        bounds: MemoryBounds | None = None,
    ) -> None:
        """`on_open` gets each shard that was opened. `on_dirty` gets the id of one with work for its upkeep, under the
        locks of its log: it must not wait. `bounds` are shared with other engines, if given."""
        super().__init__()
        self.directory = shards
        self.places = places
        self.bounds = bounds or MemoryBounds.of(settings.runtime, clock)
        self._settings = settings
        # Where exports wait for sealed files, also the smallest is sealed at its age.
        self._log_settings = replace(settings.wal, rotate_bytes_min=0) if settings.is_shared else settings.wal
        self._disk = disk
        self._clock = clock
        self._metadata = metadata
        self._owner_session = owner_session
        self._on_open = on_open
        self._on_dirty = on_dirty
        self._given_up: dict[str, ShardState] = {}
        """Shards that were sealed here, as they stood then."""

    def prepare(self, spec: TopicSpec) -> None:
        """See `StorageEngine`."""
        super().prepare(spec)
        if not self._disk.exists(self.directory):
            raise Unavailable(f"{self.directory}, where the log files lie, is not there: see that its disk is mounted")

    def directory_of(self, ref: ShardRef) -> str:
        """Where the files of the shard lie."""
        return f"{self.directory}/{ref.id}"

    def catalog(self, ref: ShardRef) -> ShardCatalog:
        """The history of the shard as recorded, whether or not it is open."""
        return self._around(self._owner_session.session).catalog(ref)

    def was_here(self, ref: ShardRef) -> bool:
        """Whether the shard was last open in this directory, and was not given up since, nor half-way."""
        if not self._disk.exists(self.directory_of(ref)):
            return False
        stored = self._stored(ref)
        return stored is not None and self.is_ours(stored.state) and stored.state.phase is Phase.OPEN

    def may_own(self, ref: ShardRef) -> bool:
        """See `ShardedEngine`. Files without a recorded state are opened: that refuses them by name."""
        return self._is_here(ref, self._stored(ref))

    def _is_here(self, ref: ShardRef, stored: StoredState | None) -> bool:
        if stored is None:
            return self._disk.exists(self.directory_of(ref))
        return self.is_ours(stored.state)

    def open_here(self, ref: ShardRef) -> SegmentShard:
        """See `ShardedEngine`; `Unavailable` if the shard has changed hands since `may_own` was asked."""
        return self.registry.open(ref, partial(self._open, check=self._refuse_others))

    def open_accepting_loss(self, ref: ShardRef, by: str) -> SegmentShard:
        """As `open_shard`: `by` has accepted that what its last holder has not exported is lost, and that is recorded.

        `Unsupported` where offsets are reserved in the log alone: no other directory can go on with such a shard.
        """
        stored = None if self._settings.is_shared else self._stored(ref)
        if stored is not None and is_take_over(stored.state, self._owner_session.holder):
            raise Unsupported(
                f'{ref} cannot be taken over: storage.mode is "local" and what it holds lies in one directory alone; '
                "open that directory"
            )
        return self.registry.open(ref, partial(self._open, accepted_by=by))

    def acquire_many(
        self, refs: Sequence[ShardRef], states: Mapping[str, Entry], is_alive: Callable[[str], bool] | None = None
    ) -> Iterator[Acquisition]:
        """Acquire closed shards of this directory, in few transactions; what became of each of `refs`, in order.

        `states` are the recorded states by their keys, as just read. What another directory has, what is sealed and
        what was never used is left alone: only an append or another write asks for it here. One that cannot be opened
        does not keep the others closed. Holds the lock of one shard at a time, and none while shards are acquired.
        `is_alive` answers for the store whether a session lives, for a caller that acquires several such lists.
        """
        self.registry.check_open()
        session = self._owner_session.session
        is_alive = is_alive if is_alive is not None else cache(self._metadata.session_alive)
        for first in range(0, len(refs), BATCH_SHARDS):
            found: dict[ShardRef, StoredState | ForebayError | OSError | None] = {}
            for ref in refs[first : first + BATCH_SHARDS]:
                try:
                    found[ref] = self._closed_here(ref, states, session, is_alive)
                except (ForebayError, OSError) as error:
                    found[ref] = error
            ours = {ref: stored for ref, stored in found.items() if isinstance(stored, StoredState)}
            acquired = self._acquire_together(ours, session)
            for ref, stored in found.items():
                if isinstance(stored, StoredState):
                    opening = partial(self.open_acquired, acquired=acquired.get(ref), session=session)
                    yield Acquisition(ref, opening=opening, tail_bytes=self._tail_bytes(ref))
                else:
                    yield Acquisition(ref, error=stored)

    def living_owners(self, refs: Sequence[ShardRef], states: Mapping[str, Entry]) -> Callable[[str], bool]:
        """Whether a session lives that is recorded as an owner of one of these shards, each asked of the store once.

        For threads that acquire parts of `refs`: while one of them ends a session, the store may show it as alive.
        """
        owners = set()
        for entry in (states.get(wanted(ref, self._settings).key) for ref in refs):
            # One that cannot be read is refused when it is to be acquired.
            with suppress(ForebayError):
                owners.add(decode_state(entry).state.owner if entry is not None else None)
        alive = {session: self._metadata.session_alive(session) for session in owners if session is not None}
        return alive.__getitem__

    def _tail_bytes(self, ref: ShardRef) -> int:
        try:
            return tail_bytes(self._disk, self.directory_of(ref))
        except OSError:
            # The opening meets it too, and names it.
            return 0

    def _closed_here(
        self, ref: ShardRef, states: Mapping[str, Entry], session: Session, is_alive: Callable[[str], bool]
    ) -> StoredState | None:
        """The state of a shard of this directory that can be opened and is not open; `None` of any other."""
        shard = wanted(ref, self._settings)
        entry = states.get(shard.key)
        stored = decode_state(entry) if entry is not None else None
        if self.find(ref) is not None or not self._is_here(ref, stored):
            return None
        with self.registry.lock(ref.spec.topic_id, ref.partition):
            self._make_directory(ref, stored)
        self._refuse_contradiction(ref, stored.state if stored is not None else None)
        # In one transaction with the others it would keep them all closed.
        owner = Owner(session.id, self._owner_session.holder)
        refuse_if_owned(self._metadata, shard, stored, owner, is_alive=is_alive)
        return stored

    def _acquire_together(self, shards: Mapping[ShardRef, StoredState], session: Session) -> dict[ShardRef, Acquired]:
        """Own shards in one transaction, without their locks; empty if they must be acquired one by one.

        Refuses a shard that this session owns already: another thread here may be recovering it, and a second
        acquisition would fence it.
        """

        def check(ref: ShardRef, state: ShardState | None) -> None:
            if state is None or state.owner == session.id or not self.is_ours(state):
                raise Unavailable(f"{ref} changed hands while it was being acquired together with others")

        known = {wanted(ref, self._settings).key: stored for ref, stored in shards.items()}
        try:
            return dict(zip(shards, self._acquire(list(shards), session, check, known), strict=True))
        except ForebayError as error:
            logger.info("%d shards are acquired one by one: %s", len(shards), error)
            return {}

    def open_acquired(
        self, ref: ShardRef, on_bytes: Callable[[int], None], *, acquired: Acquired | None, session: Session
    ) -> SegmentShard:
        """The shard, opened by what `acquire_many` acquired; `on_bytes` gets the count of bytes walked."""
        opening = partial(self._open_acquired, acquired=acquired, session=session, on_bytes=on_bytes)
        return self.registry.open(ref, opening)

    def _open_acquired(
        self, ref: ShardRef, *, acquired: Acquired | None, session: Session, on_bytes: Callable[[int], None]
    ) -> SegmentShard:
        """Recover a shard as it was acquired together with others, or acquire it by itself if that is not so any more.

        Called with the shard's lock held: no other thread here acquires it from the look at its state on.
        """
        stored = self._stored(ref)
        if stored is None or stored.state.incarnation != ref.spec.topic_id:
            raise UnknownTopic(f"{ref}: the topic was deleted while its shard was being opened", shard=ref)
        if acquired is None or stored.state.epoch != acquired.epoch:
            return self._open(ref, self._refuse_others, on_bytes)
        return self._recover(ref, acquired.before, acquired.epoch, session, on_bytes)

    def close(self) -> None:
        """See `StorageEngine`. Where another directory may go on, it finds as much of the tail as could be exported."""
        shards = self.shards() if self._settings.is_shared and not self.registry.is_closed else []
        export_tails(shards, self._clock, self._settings.export.at_close_seconds_max)
        try:
            super().close()
        finally:
            self.bounds.caches.worker.stop()
            self._end_reservations(shards)

    def _end_reservations(self, shards: Sequence[SegmentShard]) -> None:
        """Say of shards that are closed where they end."""
        ended = [
            ClosedShard(wanted(shard.ref, self._settings).key, shard.epoch, shard.wal.writer.next)
            for shard in shards
            if shard.wal.failure is None and _is_to_record(shard.wal.writer)
        ]
        try:
            end_reservations(self._metadata, ended, clock=self._clock)
        except ForebayError as error:
            logger.warning("what was reserved stays so, and is skipped if another directory goes on: %s", error)

    def seal_shard(
        self,
        shard: SegmentShard,
        *,
        target: str | None,
        quiesce: Callable[[], None],
        on_file: OnFile | None = None,
        accept_damage: bool = False,
    ) -> ShardState:
        """Seal an open shard and give it up, to `target` if given; its state on return. See `finish_seal` for damage.

        `quiesce` stops the background work on it. If anything fails the shard is closed, and its next use takes the
        seal back. The shard stays open to readers meanwhile, and appends are refused.
        """
        ref = shard.ref
        if accept_damage:
            self.accept_unknown_producers(shard)
        around = self._around(self._owner_session.session)
        # While it goes on here if that fails: once it is being sealed, what cannot be written is lost.
        shard.flush()
        try:
            begin_seal(shard, around, target)
            quiesce()
            state = self._given_up[ref.id] = finish_seal(
                shard, around, clock=self._clock, on_file=on_file, accept_damage=accept_damage
            )
        finally:
            # Again: a user of the shard may have asked for background work meanwhile.
            quiesce()
            self.retire(ref)
        return state

    def accept_unknown_producers(self, shard: SegmentShard) -> None:
        """From now on producers that are not known count as new ones, though damage may have taken their appends."""
        ref = shard.ref
        if shard.wal.writer.window.is_partial:
            record_unknown(self._metadata, wanted(ref, self._settings), shard.epoch, 0, clock=self._clock)
            shard.wal.writer.window.is_partial = False
            logger.warning(
                "%s: producers that are not known here are taken for new ones: a repeat is stored again", ref
            )

    def take_back(self, ref: ShardRef) -> None:
        """A shard that was sealed here may be opened here again, or its topic was deleted."""
        self._given_up.pop(ref.id, None)

    def retire(self, ref: ShardRef) -> None:
        """Close the shard, if it is open: its next use waits for that, and acquires it again."""
        self.registry.give_up(ref.spec.topic_id, ref.partition, self._close_if_open)

    def retire_lost(self, shard: SegmentShard, may_close: Callable[[], bool]) -> bool:
        """Close this very shard, which another owner has; false if that is to be tried again. See `give_up_this`."""
        return self.registry.give_up_this(shard, may_close, self._close_lost)

    def clear_moved(self, ref: ShardRef, *, wait: bool = True) -> None:
        """If another directory has the shard now, remove what is left of it here.

        Without `wait`, for a background worker, not while another thread opens the shard or gives it up.
        """
        if self._disk.exists(self.directory_of(ref)):
            (self.registry.if_closed if wait else self.registry.if_idle)(ref, partial(self._clear_moved, ref))

    def _clear_moved(self, ref: ShardRef) -> None:
        stored = self._stored(ref)
        if stored is None or stored.state.incarnation != ref.spec.topic_id:
            return
        if stored.state.holder not in (None, self._owner_session.holder):
            clear_away(self._disk, self.directory_of(ref), self.catalog(ref), self._settings.wal)

    def _open(
        self,
        ref: ShardRef,
        check: _Check | None = None,
        on_bytes: Callable[[int], None] | None = None,
        accepted_by: str | None = None,
    ) -> SegmentShard:
        self._refuse_given_up(ref)
        self._make_directory(ref, self._stored(ref), accepted_by)
        session = self._owner_session.session
        before, epoch = self._acquire([ref], session, check, accepted_by=accepted_by)[0]
        return self._recover(ref, before, epoch, session, on_bytes)

    def _refuse_given_up(self, ref: ShardRef) -> None:
        """Raise `Moved` for a shard that was sealed here, unless another owner has had it since and sealed it too."""
        given_up = self._given_up.get(ref.id)
        if given_up is None:
            return
        stored = self._stored(ref)
        if stored is None or stored.state.phase is not Phase.SEALED or stored.state.epoch == given_up.epoch:
            raise Moved(
                f"{ref} was sealed here at offset {given_up.next_offset}: use it where it is now, or take it back here "
                'with unseal_topic or "forebay topic unseal"',
                shard=ref,
            )
        self.take_back(ref)

    def _acquire(
        self,
        refs: Sequence[ShardRef],
        session: Session,
        check: _Check | None = None,
        known: Mapping[str, StoredState] | None = None,
        accepted_by: str | None = None,
    ) -> list[Acquired]:
        """Own these shards. Where offsets are reserved in the log alone, not those that lie in another directory.

        `check` refuses a shard by the state before; by default one that contradicts the local files. `known` are the
        states by their keys, if they were just read. For `accepted_by` see `acquire`.
        """
        refuse = check or self._refuse_contradiction
        owner, is_shared = Owner(session.id, self._owner_session.holder), self._settings.is_shared
        shards = {wanted(ref, self._settings): ref for ref in refs}
        # Else the log alone knows how far its offsets went, whenever it comes back.
        missing = [
            shard for shard, ref in shards.items() if is_shared and not has_log(self._disk, self.directory_of(ref))
        ]
        return acquire(
            self._metadata,
            list(shards),
            owner,
            clock=self._clock,
            take_over=TakeOver.WITH_YES if is_shared else TakeOver.NEVER,
            accepted_by=accepted_by,
            check=lambda shard, state: refuse(shards[shard], state),
            without_log=frozenset(missing),
            known=known,
        )

    def _refuse_contradiction(self, ref: ShardRef, state: ShardState | None) -> None:
        """Raise `Conflict` while the recorded state still says what the local files contradict."""
        if state is not None and state.phase is not Phase.SEALED:
            return
        facts = survey(self._disk, self.directory_of(ref), self._settings.wal, writable=False)
        for scan in facts.logs:
            scan.file.close()
        refuse_contradiction(facts, state, str(ref))

    def _stored(self, ref: ShardRef) -> StoredState | None:
        return read_state(self._metadata, wanted(ref, self._settings).key)

    def is_ours(self, state: ShardState) -> bool:
        """Whether a shard so recorded is this directory's: its log goes on here, if it goes on."""
        return state.holder == self._owner_session.holder and state.phase is not Phase.SEALED

    def _refuse_others(self, ref: ShardRef, state: ShardState | None) -> None:
        if state is not None and not self.is_ours(state):
            raise Unavailable(f"{ref} changed hands while it was looked at; try again")
        self._refuse_contradiction(ref, state)

    def _make_directory(self, ref: ShardRef, stored: StoredState | None, accepted_by: str | None = None) -> None:
        """Give a shard that is new here its directory before we own it: from then on, one that is missing was lost.

        Going on without it would give offsets out twice, unless they are reserved in the metadata store.
        """
        directory = self.directory_of(ref)
        if stored is None or stored.state.holder != self._owner_session.holder:
            if stored is not None:
                self._check_within_reach(ref, stored, accepted_by)
            make_directories(self._disk, directory)
        elif not self._disk.exists(directory):
            refuse_lost_directory(stored.state, self._owner_session.holder, str(ref), directory)
            make_directories(self._disk, directory)

    def _check_within_reach(self, ref: ShardRef, stored: StoredState, accepted_by: str | None) -> None:
        """Refuse a shard whose history cannot be read here, while it is still where it can be.

        And one that waits for its owner: `acquire` refuses it too, after its history was looked for in vain.
        """
        state, holder = stored.state, self._owner_session.holder
        if is_promised(state, holder):
            return
        if state.owner is not None and self._metadata.session_alive(state.owner):
            return
        if self._settings.is_shared:
            judge(self._metadata, wanted(ref, self._settings).key, stored, holder, accepted_by, self._clock)
        for piece in self.catalog(ref).descriptors():
            if piece.gap is None:
                self.places.segment(piece).close()

    def _close(self, shard: SegmentShard) -> None:
        """`DataLoss` once it is closed, if acknowledged records are gone."""
        try:
            try:
                shard.upkeep.close()
            finally:
                shard.history.close()
        except (OSError, Fenced) as error:
            # The others must still be closed; what is missing here is found by the next recovery.
            logger.warning("%s: not closed in order: %s", shard.ref, error)

    def _close_lost(self, shard: SegmentShard) -> None:
        """As `_close`; what was lost with the shard was said when this owner was stopped."""
        with suppress(DataLoss):
            self._close(shard)

    def _close_if_open(self, shard: SegmentShard | None) -> None:
        if shard is not None:
            self._close(shard)

    def _around(self, session: Session) -> ShardContext:
        return ShardContext(
            self._metadata, self._settings, self.places, self._owner_session.holder, session.alive, self.bounds
        )

    def _recover(
        self,
        ref: ShardRef,
        before: ShardState | None,
        epoch: int,
        session: Session,
        on_bytes: Callable[[int], None] | None,
    ) -> SegmentShard:
        around = self._around(session)
        if before is not None and before.holder not in (None, self._owner_session.holder):
            drop_history(self._disk, self.directory_of(ref), around.catalog(ref), self._settings.wal)
        try:
            shard = SegmentShard.open(
                ref,
                self.directory_of(ref),
                self._log_settings,
                disk=self._disk,
                clock=self._clock,
                before=before,
                epoch=epoch,
                holder=self._owner_session.holder,
                around=around,
                on_bytes=on_bytes,
                on_dirty=partial(self._on_dirty, ref.id),
            )
        except (Conflict, Corrupt):
            # The next that looks, here or elsewhere, need not find our attempt.
            give_back(self._metadata, wanted(ref, self._settings).key, before, epoch)
            raise
        self._on_open(shard)
        return shard

    def _remove(self, ref: ShardRef, shard: SegmentShard | None) -> None:
        if shard is not None:
            shard.wal.close(deleting=True)
            shard.history.close()
        remove_files(self._disk, self.directory, ref.id)
