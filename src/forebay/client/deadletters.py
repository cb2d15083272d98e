"""Dead letters on a broker, for asyncio and for threads that wait. The surface of `forebay.surface`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec

from forebay.arguments import checked_partition
from forebay.client.loops import LoopThread
from forebay.client.topics import decoded, topic_path
from forebay.client.transport import HttpCall, Transport
from forebay.records import DeadLetter, LetterPlace, check_offset
from forebay.topics import TopicName
from forebay.wire.bodies import MediaType
from forebay.wire.subscriptions import LetterCount, LetterItem, LetterList

PAGE_LETTERS = 1_000
"""Dead letters that one request brings."""
LETTERS_BYTES_MAX = 2 * 1024 * 1024
"""Behind so many bytes no further page is asked for: a list of them holds a few MiB at most."""


class AsyncRemoteDeadLetters:
    """The dead letters in a topic on a broker. Made by `AsyncRemoteSubscription` and `AsyncRemoteTopic`."""

    def __init__(self, transport: Transport, topic: str, origin: tuple[str, str] | None = None) -> None:
        """`origin` is the topic and the name of the subscription whose letters they are."""
        self._transport = transport
        self._topic = topic
        self._path = f"{topic_path(TopicName.parse(topic))}/deadletters"
        self._origin = {} if origin is None else {"origin": origin[0], "subscription": origin[1]}

    @property
    def topic(self) -> str:
        """The topic that they lie in."""
        return self._topic

    async def letters(self, records_max: int = 100, *, after: LetterPlace | None = None) -> list[DeadLetter]:
        """See `surface.awaiting.DeadLetters.letters`."""
        found: list[DeadLetter] = []
        size = 0
        while True:
            query = {**self._origin, "records_max": str(min(records_max - len(found), PAGE_LETTERS))}
            if after is not None:
                query |= {"after_partition": str(after.partition), "after_offset": str(after.offset)}
            call = HttpCall(method="GET", path=self._path, query=query)
            page = (await self._transport.call(call, partial(decoded, LetterList))).letters
            found += [item.letter() for item in page]
            size += sum(len(letter.record.value or b"") for letter in found[-len(page) :] if page)
            if not page or len(found) >= records_max or size > LETTERS_BYTES_MAX:
                return found
            after = found[-1].place

    async def get(self, offset: int, partition: int = 0) -> DeadLetter:
        """See `surface.awaiting.DeadLetters.get`."""
        check_offset(offset)
        query = {**self._origin, "offset": str(offset), "partition": str(checked_partition(partition))}
        call = HttpCall(method="GET", path=f"{self._path}/letter", query=query)
        return await self._transport.call(call, lambda body: decoded(LetterItem, body).letter())

    async def replay(
        self,
        places: Iterable[LetterPlace] | None = None,
        *,
        to: str | TopicName | None = None,
        origins: Iterable[str | TopicName] = (),
    ) -> int:
        """See `surface.awaiting.DeadLetters.replay`. What an attempt without an answer has replayed is not counted."""
        fields: dict[str, Any] = {} if to is None else {"to": str(TopicName.parse(to))}
        if named := [str(TopicName.parse(name)) for name in origins]:
            fields["origins"] = named
        return await self._post("replay", places, fields)

    async def purge(self, places: Iterable[LetterPlace] | None = None) -> int:
        """See `surface.awaiting.DeadLetters.purge`. What an attempt without an answer has deleted is not counted."""
        return await self._post("purge", places, {})

    async def _post(self, verb: str, places: Iterable[LetterPlace] | None, fields: dict[str, Any]) -> int:
        asked = {**self._origin, **fields}
        if places is not None:
            asked["places"] = [place._asdict() for place in places]
        call = HttpCall(
            method="POST", path=f"{self._path}/{verb}", content=msgspec.json.encode(asked), media=MediaType.JSON
        )
        return await self._transport.call(call, lambda body: decoded(LetterCount, body).letters)


class RemoteDeadLetters:
    """The dead letters in a topic on a broker. For any number of threads."""

    def __init__(self, letters: AsyncRemoteDeadLetters, loop: LoopThread) -> None:
        self._letters = letters
        self._loop = loop

    @property
    def topic(self) -> str:
        """The topic that they lie in."""
        return self._letters.topic

    def letters(self, records_max: int = 100, *, after: LetterPlace | None = None) -> list[DeadLetter]:
        """See `surface.DeadLetters.letters`."""
        return self._loop.call(partial(self._letters.letters, records_max, after=after))

    def get(self, offset: int, partition: int = 0) -> DeadLetter:
        """See `surface.DeadLetters.get`."""
        return self._loop.call(partial(self._letters.get, offset, partition))

    def replay(
        self,
        places: Iterable[LetterPlace] | None = None,
        *,
        to: str | TopicName | None = None,
        origins: Iterable[str | TopicName] = (),
    ) -> int:
        """See `surface.DeadLetters.replay`, and `AsyncRemoteDeadLetters.replay`."""
        return self._loop.call(partial(self._letters.replay, places, to=to, origins=origins))

    def purge(self, places: Iterable[LetterPlace] | None = None) -> int:
        """See `surface.DeadLetters.purge`, and `AsyncRemoteDeadLetters.purge`."""
        return self._loop.call(partial(self._letters.purge, places))
