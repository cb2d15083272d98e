"""One shard: who owns it, where its log goes on after a stop, and the log opened accordingly.

Knows the log and the metadata store; knows nothing of topics beyond their definition, nor of engines.
"""

from forebay.shard.context import ShardContext
from forebay.shard.ownership import Owner, Wanted, acquire
from forebay.shard.recovery import NextSource, RecoveryDecision, Situation, decide
from forebay.shard.segment import SegmentShard
from forebay.topics import ShardRef

__all__ = [
    "Owner",
    "RecoveryDecision",
    "SegmentShard",
    "ShardRef",
    "Situation",
    "NextSource",
    "ShardContext",
    "Wanted",
    "acquire",
    "decide",
]
