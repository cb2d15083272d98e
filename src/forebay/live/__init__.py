"""Follows topics for many watchers of one event loop: one waker per shard and loop, each page read and rendered once.

Knows topics and event loops; knows nothing of sockets, nor of who may read what.
"""

from forebay.live.calls import KeptCall, StartCall
from forebay.live.feeds import Feeds, Render
from forebay.live.watcher import Watcher

__all__ = ["Feeds", "KeptCall", "Render", "StartCall", "Watcher"]
