"""Which stores the catalog speaks of, over all topics."""

from __future__ import annotations

import contextlib

from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.descriptor import SegmentDescriptor
from forebay.format.keys import PREFIX
from forebay.format.value import decode_value
from forebay.metadata import MetadataStore

PAGE_KEYS = 1000
_SEGMENTS = "/segments/"
_CUR = "/segments/cur"


def names_store(metadata: MetadataStore, store: str, *, prefix: str = PREFIX) -> bool:
    """Whether any piece of history lies in the store of this name. Looks at every one if none does."""
    last: str | None = None
    while page := metadata.range(f"{prefix}/storage/topics/", start_after=last, limit=PAGE_KEYS):
        for entry in page:
            if _SEGMENTS in entry.key and not entry.key.endswith(_CUR):
                # What cannot be read here fails at the call that needs it.
                with contextlib.suppress(Corrupt, UnsupportedFormat):
                    if decode_value(entry.value, SegmentDescriptor)[0].store == store:
                        return True
        last = page[-1].key
    return False
