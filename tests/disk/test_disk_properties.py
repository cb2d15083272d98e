"""Random histories: both disks behave alike, and the crash explorer agrees with what a process saw."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable
from typing import TypeAlias

from hypothesis import given
from hypothesis import strategies as st

from forebay.disk import Disk, SystemDisk
from forebay.testing.simulated.crashes import crash_states, explore
from forebay.testing.simulated.damage import POWER, CrashDamage
from forebay.testing.simulated.disk import SimulatedDisk

Step: TypeAlias = tuple[str, int, int, int]

NAMES = ("a", "b", "s", "s/a", "s/b", "s/t")
ACTIONS = (
    "create", "write", "write", "truncate", "sync", "rename", "link", "unlink", "make", "remove", "sync_directory",
)  # fmt: skip

steps = st.lists(
    st.tuples(
        st.sampled_from(ACTIONS), st.integers(0, len(NAMES) - 1), st.integers(0, len(NAMES) - 1), st.integers(0, 40)
    ),
    max_size=25,
)


@given(steps)
def test_both_disks_answer_random_histories_alike(history: list[Step]) -> None:
    system, simulated = SystemDisk(descriptors_max=2), SimulatedDisk(directories=["/d"])

    with tempfile.TemporaryDirectory() as root:
        for step in history:
            assert _answer(system, root, step) == _answer(simulated, "/d", step), step
        assert _listing(system, root) == _listing(simulated, "/d")
    system.abandon()


@given(steps)
def test_a_kill_leaves_what_the_process_saw(history: list[Step]) -> None:
    disk = SimulatedDisk(directories=["/d"])
    for step in history:
        _answer(disk, "/d", step)

    (killed,) = crash_states(disk.trace, damages=[CrashDamage.KILLED])

    assert _listing(killed.disk(), "/d") == _listing(disk, "/d")


@given(steps)
def test_after_everything_was_synced_there_is_one_outcome(history: list[Step]) -> None:
    disk = SimulatedDisk(directories=["/d"])
    for step in history:
        _answer(disk, "/d", step)
    disk.sync_filesystem("/d")

    states = list(crash_states(disk.trace))

    assert len({state.digest() for state in states}) == 1
    assert _listing(states[-1].disk(), "/d") == _listing(disk, "/d")


@given(steps)
def test_what_was_durable_once_and_not_changed_since_survives_any_later_crash(history: list[Step]) -> None:
    disk = SimulatedDisk(directories=["/d", "/kept"])
    kept = disk.create("/kept/file")
    kept.write_at(b"synced, with its name", 0)
    kept.sync()
    disk.sync_directory("/kept")
    begun = len(disk.trace)
    for step in history:
        _answer(disk, "/d", step)
    kept.write_at(b"unsynced", 21)

    for state in explore(disk.trace, range(begun, len(disk.trace) + 1), states_max=4):
        assert state.files()["/kept/file"].startswith(b"synced, with its name"), state


@given(steps)
def test_no_crash_makes_up_names_or_sizes(history: list[Step]) -> None:
    disk = SimulatedDisk(directories=["/d"])
    names, size = {"/d"}, 0
    for step in history:
        _answer(disk, "/d", step)
        seen = _listing(disk, "/d")
        names |= {f"/d/{name}" for name in seen}
        size = max([size, *(len(content) for content in seen.values() if content is not None)])

    for state in explore(disk.trace, damages=POWER, states_max=4):
        # A rename carries what a directory held earlier to its new name, so parts are compared and not whole paths.
        assert {part for path, _ in state.paths for part in path.split("/")} <= {
            part for path in names for part in path.split("/")
        }
        assert max([0, *map(len, state.files().values())]) <= size + 80


def _answer(disk: Disk, root: str, step: Step) -> object:
    """What the step gives, or the number of the error it meets."""
    action, one, two, number = step
    path, other = f"{root}/{NAMES[one]}", f"{root}/{NAMES[two]}"
    actions: dict[str, Callable[[], object]] = {
        "create": lambda: disk.create(path).close(),
        "write": lambda: disk.open(path, writable=True).write_at(bytes([number + 1]) * number, number),
        "truncate": lambda: disk.open(path, writable=True).truncate(number),
        "sync": lambda: disk.open(path).sync(),
        "rename": lambda: disk.rename(path, other),
        "link": lambda: disk.link(path, other),
        "unlink": lambda: disk.unlink(path),
        "make": lambda: disk.make_directory(path),
        "remove": lambda: disk.remove_directory(path),
        "sync_directory": lambda: disk.sync_directory(path),
    }
    try:
        return actions[action]()
    except OSError as error:
        # Systems differ on how to refuse to unlink a directory.
        return errno.EISDIR if error.errno == errno.EPERM else error.errno


def _listing(disk: Disk, root: str, below: str = "") -> dict[str, bytes | None]:
    """Every name below `root` with its bytes; a directory has none."""
    found: dict[str, bytes | None] = {}
    for name in disk.list_directory(f"{root}/{below}"):
        try:
            found[below + name] = disk.open(f"{root}/{below}{name}").read_at(1_000, 0)
        except IsADirectoryError:
            found[below + name] = None
            found.update(_listing(disk, root, f"{below}{name}/"))
    return found
