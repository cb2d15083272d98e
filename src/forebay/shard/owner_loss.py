"""Loss needs a yes: whether a shard may be taken over whose owner is gone with records that it had not exported.

Where history is shared, any directory can go on with a shard, but what its last holder had not exported lies on that
holder's disk alone, and a take-over turns it into a gap for ever. `judge` is asked inside `acquire`, by what one look
at the metadata store found: the topic allows it (`on_owner_loss`), an operator does, or it is refused. Knows the
metadata store, nothing of logs.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

import msgspec

from forebay.catalog import ShardCatalog, ShardKeys, StoredState
from forebay.clock import Clock
from forebay.definitions import Defined
from forebay.errors import Unavailable, UnknownTopic
from forebay.format.metadata.descriptor import AcceptedLoss, Phase, ShardState
from forebay.format.metadata.keys import prefix_of_state, topic_key
from forebay.metadata import Compare, MetadataStore, RevisionIs
from forebay.records import Gap, Reason
from forebay.shard.directories import directory_beside
from forebay.topics import OnOwnerLoss

LOSSES_MAX: Final = 32
"""So many accepted losses are kept in the state of a shard."""
BY_POLICY: Final = 'on_owner_loss "take_over"'
"""Who accepted a loss that the topic's definition allows."""
BY_CHARACTERS_MAX: Final = 200


class TakeOver(enum.Enum):
    """Whether a shard that another directory held last, and did not seal, may be acquired once its owner is gone."""

    NEVER = enum.auto()
    """Offsets are reserved in the log alone, so only the directory that has it can go on."""
    WITH_YES = enum.auto()
    """Yes; where its last holder may have records that history lacks, the topic or an operator must allow it."""
    FREELY = enum.auto()
    """Yes: its records have ended with the process that had them."""


class Judgement(NamedTuple):
    """A shard may be acquired: what its owner before gives up by that, if anything, and what must still hold."""

    loss: AcceptedLoss | None = None
    compares: tuple[Compare, ...] = ()


def is_take_over(state: ShardState, holder: str) -> bool:
    """Whether the directory `holder` would go on with a shard that another one held last, and did not seal."""
    return state.phase is not Phase.SEALED and state.holder not in (None, holder)


def tail_at_risk(state: ShardState, frontier: int, holder: str) -> Gap | None:
    """The offsets that a take-over by the directory `holder` would give up; `None` if there are none.

    `frontier` is the end of history. Offsets are reserved before they are used, so nothing lies beyond what is
    reserved; what of it was never given out is not known to any other directory.
    """
    if not is_take_over(state, holder) or state.reserved_end <= frontier:
        return None
    return Gap(frontier, state.reserved_end, Reason.LOST)


def judge(
    store: MetadataStore, key: str, stored: StoredState, holder: str, accepted_by: str | None, clock: Clock
) -> Judgement:
    """Whether the directory `holder` may take over the shard as it was found; `Unavailable` if that needs a yes.

    The session of its last owner has ended: the caller's transaction compares that, and the revision of the state.
    History only grows, so a tail that was not at risk by this look is not at risk when that transaction holds.
    """
    keys, state = ShardKeys.of_state(key), stored.state
    frontier = ShardCatalog(store, keys, state.incarnation, clock=clock).frontier().next
    tail = tail_at_risk(state, frontier, holder)
    if tail is None:
        return Judgement()
    if accepted_by is not None:
        return Judgement(_loss(state, tail, accepted_by[:BY_CHARACTERS_MAX], clock))
    definition = topic_key(keys.namespace, keys.topic, prefix=prefix_of_state(key))
    entry = store.get(definition)
    defined = Defined.of(entry) if entry is not None else None
    if defined is None or defined.spec.topic_id != state.incarnation:
        raise UnknownTopic(f"{keys}: the topic was deleted", shard=keys)
    if defined.spec.loss_policy is OnOwnerLoss.TAKE_OVER:
        # The definition must still say so when the transaction holds.
        return Judgement(_loss(state, tail, BY_POLICY, clock), (RevisionIs(definition, defined.revision),))
    raise refusal(store, key, state, tail)


def refusal(store: MetadataStore, key: str, state: ShardState, tail: Gap) -> Unavailable:
    """The error for a shard that waits for its holder: who that is, what is at risk, and what to do."""
    name = ShardKeys.of_state(key)
    return Unavailable(
        f"{name} waits for {directory_beside(store, key, state.holder)}, whose process is gone: offsets "
        f"[{tail.start}, {tail.stop}) were not exported and may hold records that lie there alone. Start a process in "
        f'that directory; or give these records up with "forebay shard take-over {name} --accept-loss". History up to '
        f"{tail.start} can be read meanwhile",
        shard=name,
    )


def with_loss(state: ShardState, loss: AcceptedLoss) -> ShardState:
    """The state with one more accepted loss; of too many the oldest goes."""
    return msgspec.structs.replace(state, accepted_losses=(*state.losses, loss)[-LOSSES_MAX:])


def _loss(state: ShardState, tail: Gap, by: str, clock: Clock) -> AcceptedLoss:
    return AcceptedLoss(
        start=tail.start, stop=tail.stop, holder=state.holder or "", epoch=state.epoch, by=by, at=clock.now_ms()
    )
