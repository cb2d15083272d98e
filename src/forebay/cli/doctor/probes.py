"""The questions of `forebay doctor`, each answered by asking the machine."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import statistics
from collections.abc import Iterator
from typing import Final

from forebay import __version__
from forebay.cli.doctor.answers import Answer, AnswerKind
from forebay.cli.doctor.shared_probes import examine_metadata, examine_store
from forebay.cli.extras import CORE, declared, version_of
from forebay.cli.invocation import Invocation
from forebay.cli.terminal import readable_bytes, readable_time
from forebay.clock import SystemClock
from forebay.directory import LOCK, MARKER, LogDirectory, is_owned
from forebay.disk.machine import descriptors_kept, mount_id
from forebay.errors import ForebayError, Unavailable
from forebay.inspection.directory import Inspected, look
from forebay.settings import RuntimeSettings
from forebay.spark.start.java import usable_java

SYNCS: Final = 15
SLOW_SYNC_MS: Final = 50.0
CLOCK_FLOOR_MS: Final = 1_735_689_600_000
"""2025-01-01: a clock before this was never set."""
SKEW_MS: Final = 2_000
NETWORK: Final = ("nfs", "cifs", "smb", "9p", "fuse", "ceph", "gluster", "lustre", "afs")
VOLATILE: Final = ("tmpfs", "ramfs")


def examine(run: Invocation) -> Iterator[Answer]:
    """All answers, in order."""
    settings = run.settings
    yield from _versions()
    yield probe_java()
    yield probe_limits(settings.runtime.descriptors_max)
    place = _nearest(run.directory)
    yield probe_file_system(place)
    yield _free_space(run, place)
    yield from _disk_and_clock(run, place)
    yield from examine_metadata(run)
    yield from examine_store(run)
    yield from _directory(run)


def _versions() -> Iterator[Answer]:
    system = f"{platform.system()} {platform.release()}"
    yield Answer("versions", AnswerKind.OK, f"forebay {__version__}, Python {platform.python_version()}, {system}")
    needed = declared()
    if not needed:
        yield Answer("packages", AnswerKind.NOTE, "forebay runs without being installed: not known what it needs")
        return
    used = dict.fromkeys(name for names in needed.values() for name in names)
    installed = {package: version for package in used if (version := version_of(package)) is not None}
    yield Answer("packages", AnswerKind.OK, ", ".join(f"{package} {installed[package]}" for package in installed))
    lacking = {extra: [name for name in names if name not in installed] for extra, names in needed.items()}
    yield Answer(
        "extras",
        AnswerKind.OK,
        ", ".join(
            f"{extra} ({'lacks ' + ', '.join(names) if names else 'whole'})"
            for extra, names in sorted(lacking.items())
            if extra != CORE
        ),
    )


def probe_java() -> Answer:
    """Which Java Spark would run on, found by the function that starts Spark. Only Spark needs Java."""
    try:
        found = usable_java(os.environ)
    except Unavailable as error:
        needed = importlib.util.find_spec("pyspark") is not None
        return Answer("java", AnswerKind.WARNING if needed else AnswerKind.NOTE, str(error))
    text = f"Java {found.version} in {found.home} ({found.source})"
    if found.passed_over:
        return Answer("java", AnswerKind.NOTE, f"{text}; passed over for Spark: {'; '.join(found.passed_over)}")
    return Answer("java", AnswerKind.OK, text)


def probe_limits(descriptors_max: int) -> Answer:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = descriptors_kept(descriptors_max)
    needed = kept + 64
    text = f"{soft} open files allowed (ulimit -n; up to {hard}), about {needed} used at most"
    if soft != resource.RLIM_INFINITY and soft < needed:
        return Answer("limits", AnswerKind.PROBLEM, f"{text}: raise it")
    if kept < descriptors_max != RuntimeSettings().descriptors_max:
        text += f"; runtime.descriptors_max is {descriptors_max}, and half of the limit counts instead: raise the limit"
        return Answer("limits", AnswerKind.WARNING, text)
    return Answer("limits", AnswerKind.OK, text)


def _nearest(path: str) -> str:
    """The directory itself, or the nearest one above that exists."""
    place = os.path.abspath(path)
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    return place


def probe_file_system(place: str) -> Answer:
    kind, device = mount_of(place)
    text = f"{kind} on {device}, holds {place}"
    if kind.startswith(VOLATILE):
        return Answer(
            "file system", AnswerKind.WARNING, f"{text}: in memory, nothing outlives a restart of the machine"
        )
    if kind.startswith(NETWORK):
        return Answer(
            "file system", AnswerKind.WARNING, f"{text}: locks and syncs over a network may not hold; use a local disk"
        )
    return Answer("file system", AnswerKind.OK, text)


def mount_of(place: str) -> tuple[str, str]:
    """The kind of the file system that holds the place, and what it lies on."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            listed = file.read()
    except OSError:
        return "unknown", "an unknown device"
    number = mount_id(listed, os.path.realpath(place))
    line = next((line for line in listed.splitlines() if number and line.startswith(f"{number} ")), "")
    fields = line.partition(" - ")[2].split(" ")
    return (fields[0], fields[1]) if len(fields) > 1 else ("unknown", "an unknown device")


def _free_space(run: Invocation, place: str) -> Answer:
    free, least = run.disk.free_bytes(place), run.settings.wal.free_bytes_min
    text = f"{readable_bytes(free)} free"
    if free < least:
        return Answer(
            "space",
            AnswerKind.PROBLEM,
            f"{text}: appends are refused below wal.free_bytes_min, {readable_bytes(least)}",
        )
    if free < 10 * least:
        return Answer(
            "space", AnswerKind.WARNING, f"{text}; appends stop at wal.free_bytes_min, {readable_bytes(least)}"
        )
    return Answer("space", AnswerKind.OK, text)


def _disk_and_clock(run: Invocation, place: str) -> Iterator[Answer]:
    """One small file, written and synced a few times: it shows how long a sync takes, and the disk's own clock."""
    clock = SystemClock()
    path = f"{place}/forebay-doctor-{clock.random_bytes(6).hex()}.tmp"
    try:
        file = run.disk.create(path)
    except OSError as error:
        yield Answer("disk", AnswerKind.PROBLEM, f"{place} cannot be written: {error.strerror or error}")
        yield probe_clock(clock.now_ms(), None)
        return
    took = []
    try:
        for turn in range(SYNCS):
            file.write_at(bytes(4096), 4096 * turn)
            begun = clock.monotonic()
            file.sync()
            took.append((clock.monotonic() - begun) * 1000)
        now, written = clock.now_ms(), int(os.stat(path).st_mtime * 1000)
    except OSError as error:
        yield Answer("disk", AnswerKind.PROBLEM, f"{place} cannot be written: {error.strerror or error}")
        yield probe_clock(clock.now_ms(), None)
        return
    finally:
        file.close()
        run.disk.unlink(path)
    yield _syncs(took)
    yield probe_clock(now, written)


def _syncs(took: list[float]) -> Answer:
    median, worst = statistics.median(took), max(took)
    text = f"a sync of 4 KiB takes {median:.2f} ms (median of {len(took)}, at most {worst:.2f} ms)"
    if median > SLOW_SYNC_MS:
        return Answer("disk", AnswerKind.WARNING, f"{text}: appends of class fsync wait that long")
    if worst < 0.02:
        return Answer("disk", AnswerKind.WARNING, f"{text}: too quick to be true for a disk; is it one that forgets?")
    return Answer("disk", AnswerKind.OK, text)


def probe_clock(now: int, written: int | None) -> Answer:
    text = readable_time(now)
    if now < CLOCK_FLOOR_MS:
        return Answer("clock", AnswerKind.PROBLEM, f"{text}: the clock was never set, timestamps will be wrong")
    if written is not None and abs(now - written) > SKEW_MS:
        return Answer("clock", AnswerKind.WARNING, f"{text}, but the file system says {readable_time(written)}")
    return Answer("clock", AnswerKind.OK, text)


def _directory(run: Invocation) -> Iterator[Answer]:
    path = run.directory
    if not os.path.exists(path):
        yield Answer("directory", AnswerKind.NOTE, f'{path} does not exist yet: "forebay topic create" makes it')
        return
    try:
        directory = LogDirectory.look(path, run.disk)
        if run.disk.exists(f"{directory.path}/{LOCK}") and is_owned(directory.path, run.disk):
            yield Answer("lock", AnswerKind.NOTE, f"{path} is open in another process: others may read")
        else:
            yield Answer("lock", AnswerKind.OK, f"{path} is not open in any process")
        found = look(path, run.settings, run.disk, SystemClock())
    except ForebayError as error:
        yield Answer("directory", AnswerKind.PROBLEM, str(error))
        return
    except OSError as error:
        yield Answer("directory", AnswerKind.PROBLEM, f"{path} cannot be read: {error}")
        return
    yield Answer("directory", AnswerKind.OK, f"{path}: {len(found.topics)} topics, id {found.id} ({MARKER})")
    for value in found.bad:
        yield Answer("stored values", AnswerKind.PROBLEM, f"{value}")
    yield from _orphans(run, found)


def _orphans(run: Invocation, found: Inspected) -> Iterator[Answer]:
    strangers = found.strangers(run.disk)
    if not strangers:
        yield Answer("orphans", AnswerKind.OK, "every shard directory belongs to a topic")
    for stranger in strangers:
        text = f"{stranger.directory} belongs to no topic: restore the metadata that knows it, or move it away"
        yield Answer("orphans", AnswerKind.WARNING, text)
    for spec in found.deleting:
        text = f"the deletion of {spec.name} has begun and not ended: the next opening ends it"
        yield Answer("deletions", AnswerKind.NOTE, text)
