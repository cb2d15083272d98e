"""Dead letters for asyncio: each call runs in a thread of the log."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from forebay.aio.workers import DELETE, Workers
from forebay.live import CallKey
from forebay.records import DeadLetter, LetterPage, LetterPlace
from forebay.storage.deadletters import DeadLetters
from forebay.topics import TopicName


class AsyncDeadLetters:
    """The dead letters in a topic. Made by `AsyncSubscription.dead_letters` and `AsyncTopic.dead_letters`."""

    def __init__(self, letters: DeadLetters, workers: Workers) -> None:
        self._letters = letters
        self._workers = workers
        self._key = CallKey(letters.topic)

    @property
    def topic(self) -> str:
        """The topic that they lie in."""
        return self._letters.topic

    async def letters(
        self, records_max: int = 100, *, after: LetterPlace | None = None, bytes_max: int | None = None
    ) -> list[DeadLetter]:
        """See `DeadLetters.letters`."""
        return (await self.page(records_max, after=after, bytes_max=bytes_max)).letters

    async def page(
        self, records_max: int = 100, *, after: LetterPlace | None = None, bytes_max: int | None = None
    ) -> LetterPage:
        """See `DeadLetters.page`."""
        call = partial(self._letters.page, records_max, after=after, bytes_max=bytes_max)
        return await self._workers.start_reading(self._key, call)

    async def get(self, offset: int, partition: int = 0) -> DeadLetter:
        """See `DeadLetters.get`."""
        return await self._workers.start_reading(self._key, partial(self._letters.get, offset, partition))

    async def replay(
        self,
        places: Iterable[LetterPlace] | None = None,
        *,
        to: str | TopicName | None = None,
        origins: Iterable[str | TopicName] = (),
    ) -> int:
        """See `DeadLetters.replay`. Goes on in its thread if it is cancelled."""
        replay = partial(self._letters.replay, places, to=to, origins=origins)
        return await self._workers.run_job(self._key, replay)

    async def purge(self, places: Iterable[LetterPlace] | None = None) -> int:
        """See `DeadLetters.purge`. Goes on in its thread if it is cancelled."""
        return await self._workers.start(DELETE, self._key, partial(self._letters.purge, places))
