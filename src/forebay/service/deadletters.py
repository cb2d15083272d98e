"""Dead letters for callers of a server: with the rights that each call needs. For one event loop.

A dead letter says which topic it comes from, and a caller that may append to its topic may write one that has no seal.
So a replay is allowed for exactly those letters whose origin the caller may write to, and no others that come
meanwhile; and those without a seal only if the caller names their origin.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from forebay.aio.deadletters import AsyncDeadLetters
from forebay.aio.topic import AsyncTopic
from forebay.errors import Invalid
from forebay.records import DeadLetter, LetterPage, LetterPlace
from forebay.service.principals import AccessScope, Principal, check_may
from forebay.service.subscriptions import ServedSubscriptions, SubscriptionRef
from forebay.topics import TopicName

LOOKED_AT: Final = 1_000
LOOKED_AT_BYTES: Final = 1024 * 1024
"""Dead letters that are looked at together before a replay."""


class LettersRef(NamedTuple):
    """Dead letters as a request names them: all in a topic, or those of one subscription."""

    topic: TopicName
    origin: SubscriptionRef | None = None


class ServedDeadLetters:
    """The dead letters of a server. For one event loop."""

    def __init__(
        self,
        readable: Callable[[Principal, TopicName], Awaitable[AsyncTopic]],
        subscriptions: ServedSubscriptions,
    ) -> None:
        """`readable` gives a topic to a caller that may read it, if this server serves it."""
        self._readable = readable
        self._subscriptions = subscriptions

    async def letters(
        self, who: Principal, ref: LettersRef, *, records_max: int, after: LetterPlace | None, bytes_max: int
    ) -> LetterPage:
        """A page of dead letters, of about so many bytes at most; one at least, if there is one."""
        return await (await self._found(who, ref)).page(records_max, after=after, bytes_max=bytes_max)

    async def get(self, who: Principal, ref: LettersRef, place: LetterPlace) -> DeadLetter:
        """The dead letter at a place."""
        return await (await self._found(who, ref)).get(place.offset, place.partition)

    async def replay(
        self,
        who: Principal,
        ref: LettersRef,
        places: Sequence[LetterPlace] | None,
        to: TopicName | None,
        origins: Sequence[TopicName] = (),
    ) -> int:
        """Append dead letters to their origin, or elsewhere, and remove them; how many.

        Without `to` all are looked at first, so that one whose origin the caller may not write to stops all of them;
        then they are looked at again and replayed page by page: there may be more than fit into memory.
        """
        check_may(who, AccessScope.DELETE, ref.topic)
        letters = await self._found(who, ref)
        if to is not None:
            check_may(who, AccessScope.WRITE, to)
            return await letters.replay(places, to=to, origins=origins)
        named = {str(origin) for origin in origins}
        wanted = None if places is None else set(places)
        ends: dict[int, int] = {}
        async for page in _pages(letters):
            _allowed(who, page, wanted, named)
            ends.update((letter.place.partition, letter.place.offset) for letter in page)
        replayed = 0
        async for page in _pages(letters):
            # One that comes meanwhile is for a later replay: it may be one of these, refused again.
            known = [letter for letter in page if letter.place.offset <= ends.get(letter.place.partition, -1)]
            replayed += await letters.replay(_allowed(who, known, wanted, named), origins=origins)
        return replayed

    async def purge(self, who: Principal, ref: LettersRef, places: Sequence[LetterPlace] | None) -> int:
        """Delete dead letters; how many."""
        check_may(who, AccessScope.DELETE, ref.topic)
        return await (await self._found(who, ref)).purge(places)

    async def _found(self, who: Principal, ref: LettersRef) -> AsyncDeadLetters:
        topic = await self._readable(who, ref.topic)
        if ref.origin is None:
            return topic.dead_letters()
        found = await self._subscriptions.get(who, ref.origin)
        letters = await found.dead_letters()
        if letters.topic != topic.name:
            raise Invalid(
                f"the subscription {ref.origin.name} of {ref.origin.topic} has its dead letters in {letters.topic}, "
                f"not in {topic.name}"
            )
        return letters


async def _pages(letters: AsyncDeadLetters) -> AsyncIterator[list[DeadLetter]]:
    """All dead letters, a page at a time. Those of a page may be removed before the next one is asked for."""
    last: LetterPlace | None = None
    while page := await letters.letters(LOOKED_AT, after=last, bytes_max=LOOKED_AT_BYTES):
        last = page[-1].place
        yield page


def _allowed(
    who: Principal, page: Sequence[DeadLetter], wanted: set[LetterPlace] | None, origins: set[str]
) -> list[LetterPlace]:
    """Those that are meant; `Forbidden` if the caller may not write to the topic that one of them comes from.

    Where no place is chosen, letters that nothing vouches for are meant only if the caller names their origin.
    """
    meant = [
        letter
        for letter in page
        if (letter.is_vouched or letter.topic in origins if wanted is None else letter.place in wanted)
    ]
    for letter in meant:
        check_may(who, AccessScope.WRITE, TopicName.parse(letter.topic))
    return [letter.place for letter in meant]
