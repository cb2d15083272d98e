"""As whom a shard in memory takes appends: an epoch, acquired in a session that must still live."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from forebay.errors import Conflict, Fenced, UnknownTopic
from forebay.format.metadata.descriptor import ShardState
from forebay.metadata import MetadataStore
from forebay.settings import Settings
from forebay.shard import Owner, ShardRef, acquire
from forebay.shard.ownership import Check, OwnerSession, reserve_in_state, wanted


class Tenure(NamedTuple):
    """A shard that is ours for now."""

    epoch: int
    reserve: Callable[[int], int]
    still_owner: Callable[[], bool]


class Tenures:
    """Acquires shards for this process, and again in a new session where the last one has ended."""

    def __init__(self, metadata: MetadataStore, settings: Settings, owner_session: OwnerSession) -> None:
        self._metadata = metadata
        self._settings = settings
        self._owner_session = owner_session

    def begin(self, ref: ShardRef) -> tuple[Tenure, ShardState | None]:
        """Own the shard from now on; what was recorded of it before."""
        return self._acquired(ref, lambda owner: lambda _, state: None)

    def rejoin(self) -> None:
        """On return this process has a session that lives; may take long where the metadata store is away."""
        _ = self._owner_session.session

    def regain(self, ref: ShardRef, epoch: int) -> Tenure:
        """Own the shard as before, in a session that lives; `Fenced` if another owner has had it since `epoch`."""

        def check(owner: Owner) -> Check:
            def refuse(_: object, state: ShardState | None) -> None:
                # By this session: an attempt whose answer was lost.
                if state is None or (state.epoch != epoch and state.owner != owner.session):
                    raise Fenced(f"{ref}: another owner has had it since this one's session ended: open it again")

            return refuse

        try:
            return self._acquired(ref, check)[0]
        except (Conflict, UnknownTopic) as error:
            raise Fenced(str(error)) from error

    def _acquired(self, ref: ShardRef, check: Callable[[Owner], Check]) -> tuple[Tenure, ShardState | None]:
        session, shard = self._owner_session.session, wanted(ref, self._settings)
        owner = Owner(session.id, self._owner_session.holder)
        before, epoch = acquire(self._metadata, [shard], owner, check=check(owner))[0]
        return Tenure(epoch, reserve_in_state(self._metadata, shard.key, epoch), session.alive), before
