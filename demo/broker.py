"""A broker in a process of its own: orders over HTTP, a follower, kill -9, and the same broker again."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import forebay

TOPIC = "shop/visits"
BATCH = 500


@dataclass(frozen=True)
class Served:
    """What the killed broker had acknowledged, and what was there afterwards."""

    acknowledged: int
    followed: int
    found: int
    lost: int


@contextmanager
def broker(path: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`forebay serve` on a free port; its address and its process."""
    words = [sys.executable, "-m", "forebay.cli", "serve", "--data", path, "--set", "server.port=0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = re.search(r"http://\S+?(?=;)", process.stdout.readline())
        assert address is not None, "the broker says where it serves"
        yield address[0], process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait()


def serve_and_kill(path: str, visits: int) -> Served:
    """Append visits over HTTP while a follower reads them, kill the broker, start it again, and compare."""
    values = [b"visit %d" % number for number in range(visits)]
    followed: list[bytes | None] = []
    with broker(path) as (url, process), forebay.connect(url) as log:
        topic = log.create_topic(TOPIC, durability="fsync", exist_ok=True)
        following = threading.Thread(target=_follow, args=(url, followed, visits))
        following.start()
        for begin in range(0, visits, BATCH):
            topic.append_many(values[begin : begin + BATCH])
        following.join(60)
        process.kill()
        process.wait()
    with broker(path) as (url, _), forebay.connect(url) as log:
        found = [record.value for record in log.topic(TOPIC).read(on_gap=lambda *_: None)]
    return Served(len(values), len(followed), len(found), len(set(values) - set(found)))


def _follow(url: str, followed: list[bytes | None], visits: int) -> None:
    with forebay.connect(url) as log:
        for record in log.topic(TOPIC).follow(forebay.EARLIEST, timeout=60):
            followed.append(record.value)
            if len(followed) == visits:
                return
