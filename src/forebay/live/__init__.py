"""Follows topics for many watchers of one event loop: one waker per shard and loop, each page read and rendered once.

A server uses it without knowing storage: `Watcher` is a stream over topics for one connection, `poll` one page that is
waited for. Knows topics and event loops; knows nothing of sockets, nor of who may read what.
"""

from forebay.live.calls import CallKey, KeptCall, StartCall
from forebay.live.feeds import Feeds, Render, SharedPage
from forebay.live.polling import PolledPage, poll
from forebay.live.watcher import Delivered, WatchedTopic, Watcher

__all__ = [
    "CallKey",
    "Delivered",
    "Feeds",
    "KeptCall",
    "PolledPage",
    "Render",
    "SharedPage",
    "StartCall",
    "WatchedTopic",
    "Watcher",
    "poll",
]
