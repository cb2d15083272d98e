"""How a topic comes to be, in three steps: it is registered, it can be seen, its shards can be made.

    1  register   one transaction puts the definition into the metadata store: from then on the topic exists
    2  visible    a plain read of the metadata store shows it, within `metadata.topic_visible_timeout_s`
    3  shards     its engine has what it needs and no older shard has their names, within
                  `metadata.shard_visible_timeout_s`; each shard is then opened at its first use

What a step does that fails later is undone: the topic is not there afterwards, and its name is free. A process
that dies in between leaves a topic that works, or a deletion that the next process finishes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from forebay.catalog import read_state
from forebay.cleanup.deleted_topics import Deletions
from forebay.clock import Clock
from forebay.definitions import Definitions
from forebay.errors import ForebayError, Indeterminate, Unavailable, UnknownTopic
from forebay.format.metadata.keys import shards_prefix
from forebay.metadata import MetadataStore
from forebay.settings import Settings
from forebay.shard.ownership import wanted
from forebay.topics import TopicSpec, refs_of

POLL_SECONDS = 0.05


class _Step(NamedTuple):
    """A step that may take its time."""

    name: str
    way_out: str
    setting: str
    seconds: float


class Creations:
    """Creates topics."""

    def __init__(
        self,
        metadata: MetadataStore,
        definitions: Definitions,
        deletions: Deletions,
        settings: Settings,
        clock: Clock,
        *,
        prepare: Callable[[TopicSpec], None],
    ) -> None:
        """`prepare` has the engine of a topic get what it needs to open its shards; `Unavailable` if it cannot yet."""
        self._metadata = metadata
        self._prepare = prepare
        self._definitions = definitions
        self._deletions = deletions
        self._settings = settings
        self._clock = clock
        self._visible = _Step(
            "step 2 of 3, waiting to see the topic in the metadata store",
            'see with "forebay doctor" that the metadata store answers, then create the topic again',
            "metadata.topic_visible_timeout_s",
            settings.metadata.topic_visible_timeout_s,
        )
        self._ready = _Step(
            "step 3 of 3, creating the shards",
            "see to that, then create the topic again",
            "metadata.shard_visible_timeout_s",
            settings.metadata.shard_visible_timeout_s,
        )

    def create(self, spec: TopicSpec, *, exist_ok: bool) -> TopicSpec:
        """The definition in force, all steps done; `Conflict` if there is a topic of that name, unless `exist_ok`.

        If a step fails or its time is up, the error names it, and the topic is not there: `Indeterminate` if
        that could not be seen to. A topic that was there before stays.
        """
        if self._deletions.finish(spec.name):
            raise Unavailable(f"{spec.name}: the files of the deleted topic of that name are not gone yet; try again")
        spec, is_new = self._definitions.create(spec, exist_ok=exist_ok)
        if not is_new:
            # The process that created it may have died before the last step.
            self._prepare(spec)
            return spec
        try:
            self._await(self._visible, spec, lambda: self._unseen(spec))
            self._await(self._ready, spec, lambda: self._unready(spec))
        except OSError as error:
            raise self._undone(spec, Unavailable(f"{spec.name}: {self._ready.name}, failed: {error}")) from error
        except ForebayError as error:
            raise self._undone(spec, error) from error
        except BaseException:
            self._undo(spec)
            raise
        return spec

    def _await(self, step: _Step, spec: TopicSpec, missing: Callable[[], str | None]) -> None:
        """Return once nothing is missing, at the latest when the time of the step is up."""
        began = self._clock.monotonic()
        while True:
            try:
                found = missing()
            except (Unavailable, Indeterminate) as error:
                found = str(error)
            if found is None:
                return
            waited = self._clock.monotonic() - began
            if waited >= step.seconds:
                raise Unavailable(
                    f"{spec.name}: {step.name}, is not done after {waited:.3g} s ({step.setting}): {found}; "
                    f"{step.way_out}"
                )
            self._clock.sleep(min(POLL_SECONDS, step.seconds - waited))

    def _unseen(self, spec: TopicSpec) -> str | None:
        """What keeps the topic from being seen, if anything does."""
        if self._definitions.is_current(spec):
            return None
        if not self._definitions.is_registered(spec):
            raise UnknownTopic(f"topic {spec.name} was deleted while it was being created", topic=spec.name)
        return "it is registered, but reads do not show it yet"

    def _unready(self, spec: TopicSpec) -> str | None:
        """What keeps its shards from being made, if anything does."""
        self._prepare(spec)
        metadata = self._metadata
        below = shards_prefix(spec.namespace, spec.topic, prefix=self._settings.metadata.prefix)
        if not metadata.range(below, limit=1):
            return None
        for ref in refs_of(spec):
            stored = read_state(metadata, wanted(ref, self._settings).key)
            if stored is not None and stored.state.incarnation != spec.topic_id:
                self._deletions.forget_left_over(ref, stored.state.incarnation)
                return f"{ref} is still recorded as a shard of an earlier topic of that name"
        return None

    def _undone(self, spec: TopicSpec, error: ForebayError) -> ForebayError:
        """Undo everything; what to raise."""
        try:
            left = self._undo(spec)
        except ForebayError as second:
            return Indeterminate(
                f'{error}; taking the topic back failed as well ({second}): look with "forebay topic list", then '
                "delete it, or create it again with exist_ok"
            )
        return error.restated(f"{error}; " + ("what it left is removed later" if left else "nothing of it is left"))

    def _undo(self, spec: TopicSpec) -> bool:
        """On return the topic is not there; whether files of it are."""
        self._definitions.withdraw(spec)
        return any(gone.topic_id == spec.topic_id for gone in self._deletions.finish(spec.name))
