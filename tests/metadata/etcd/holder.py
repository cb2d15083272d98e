"""A process that holds a session: `python -m tests.metadata.etcd.holder hold|fork <endpoints> <seconds to live>`.

It says its session, and then at every line of input whether it may still act for it.
"""

from __future__ import annotations

import os
import sys

from forebay.clock import SystemClock
from forebay.errors import Closed
from forebay.metadata import Put
from forebay.metadata.etcd import EtcdMetadata
from forebay.settings import MetadataSettings


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(act: str, endpoints: str, ttl_s: str) -> None:
    settings = MetadataSettings(backend="etcd", endpoints=tuple(endpoints.split(",")), lease_margin_s=1)
    store = EtcdMetadata.open(settings, clock=SystemClock())
    session = store.session(float(ttl_s))
    store.transaction([], [Put("leased", b"", session=session.id)])
    if act == "fork":
        store.watch("").poll(0.0)
        child = os.fork()
        if child == 0:
            os._exit(_in_child(store, alive=session.alive()))
        say(f"child {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
    say(session.id)
    for _ in sys.stdin:
        say(str(session.alive()))
    store.close()


def _in_child(store: EtcdMetadata, *, alive: bool) -> int:
    try:
        store.get("leased")
    except Closed as error:
        store.close()
        return 2 if alive or "left behind" not in str(error) else 0
    return 1


if __name__ == "__main__":
    main(*sys.argv[1:])
