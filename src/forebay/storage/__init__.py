"""The entry point: topics by name, each on the engine it names. Embedded use starts with `Storage.open`."""

from forebay.storage.acks import Ack, BatchAck
from forebay.storage.copying import Copied
from forebay.storage.cursors import Group, Reader
from forebay.storage.deadletters import DeadLetters
from forebay.storage.recovery import FailedShard, Recovered
from forebay.storage.store import Retained, Storage
from forebay.storage.streams import Stream
from forebay.storage.subscriptions import Consumer, Subscription
from forebay.storage.topic import Topic

__all__ = [
    "Ack",
    "BatchAck",
    "Consumer",
    "Copied",
    "DeadLetters",
    "FailedShard",
    "Group",
    "Reader",
    "Recovered",
    "Retained",
    "Storage",
    "Stream",
    "Subscription",
    "Topic",
]
