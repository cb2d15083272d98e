"""Threads for calls that may wait, by what each call may wait for: what hangs in one place holds up no other.

Knows nothing of what the calls do, of topics or of event loops.
"""

from forebay.executor.schedule import GIVEN_UP_MAX, KeyedJob, Schedule, WorkClass
from forebay.executor.threads import Executor

__all__ = ["GIVEN_UP_MAX", "Executor", "KeyedJob", "Schedule", "WorkClass"]
