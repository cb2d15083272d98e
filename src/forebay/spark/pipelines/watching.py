"""Work of Spark's done by a thread of its own, so that its caller can look how far it is, and end it in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pyspark import SparkContext, StatusTracker


class Tasks(NamedTuple):
    """Of the jobs so far: how many are done, of how many that were begun."""

    done: int
    all: int


def tasks_of(tracker: StatusTracker | Any, group: str) -> Tasks:
    """The tasks of the stages that Spark has begun for a group of jobs."""
    done = total = 0
    for job in tracker.getJobIdsForGroup(group):
        found = tracker.getJobInfo(job)
        for stage in found.stageIds if found is not None else ():
            stage_info = tracker.getStageInfo(stage)
            if stage_info is not None:
                done, total = done + stage_info.numCompletedTasks, total + stage_info.numTasks
    return Tasks(done, total)


@contextmanager
def beside(context: SparkContext | Any, group: str, work: Callable[[], None]) -> Iterator[Future[None]]:
    """The work, begun in another thread. If the block is left by an error, its jobs are ended first."""

    def grouped() -> None:
        context.setJobGroup(group, group, interruptOnCancel=True)
        work()

    with ThreadPoolExecutor(1, thread_name_prefix="forebay-pipeline") as pool:
        begun = pool.submit(grouped)
        try:
            yield begun
        except BaseException:
            while not begun.done():
                # Again and again: the work may be between two jobs.
                context.cancelJobGroup(group)
                wait([begun], timeout=0.2)
            raise
