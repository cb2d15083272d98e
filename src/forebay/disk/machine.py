"""What only this operating system knows or does: flush, boot, mount, generation of an inode.

Knows descriptors and paths, nothing of who uses them. Linux is the system we run on; macOS is kept
working for development; on Windows `refuse_windows` says so before anything is touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import sys

from forebay.errors import Unsupported

if sys.platform != "win32":
    import fcntl
    import pwd
    import resource

_GET_GENERATION = 0x80087601
"""FS_IOC_GETVERSION: `_IOR('v', 1, long)` on the 64-bit machines we know; others answer ENOTTY."""

_SYNCFS_REPORTS_ERRORS_SINCE = (5, 8)
FDINFO_BYTES = 4096
"""More than the system has to say of a file that is opened by its path alone."""


def refuse_windows() -> None:
    """Raise `Unsupported` where there is no `pwrite`, no `flock` and no directory sync."""
    if sys.platform == "win32":
        raise Unsupported("Forebay needs the file system calls of Linux or macOS; on Windows run it inside WSL 2")


def flush(fd: int) -> None:
    """When it returns, the bytes and the size of the file are on stable storage."""
    if sys.platform == "darwin":
        # fsync of macOS leaves the bytes in the drive's own cache.
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(fd)


def flush_directory(fd: int) -> None:
    """When it returns, the names in the directory are on stable storage."""
    if sys.platform == "darwin":
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fsync(fd)


def flush_filesystem(fd: int) -> bool:
    """Write out the whole file system of `fd`; `True` if a failure to do so would have been raised.

    `False` (an old kernel, or no `syncfs` at all) means that every file must still be asked for itself.
    """
    syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if syncfs is None:
        os.sync()
        return False
    if syncfs(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return sys.platform == "linux" and _kernel() >= _SYNCFS_REPORTS_ERRORS_SINCE


def generation(fd: int, status: os.stat_result) -> int:
    """What differs between a file and a later one with the same inode number; 0 where the system has no such number.

    ext4 hands out a freed number at once, so the number alone would take a new file for the old one.
    """
    if sys.platform == "darwin":
        return int(status.st_birthtime * 1_000_000)
    with contextlib.suppress(OSError):
        answer: bytes = fcntl.ioctl(fd, _GET_GENERATION, bytes(8))
        return int(struct.unpack_from("=I", answer)[0])
    return 0


def descriptors_allowed() -> int:
    """How many files this process may have open at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def descriptors_kept(wanted: int) -> int:
    """How many files one disk keeps open: as many as are wanted, and at most half of what this process may open."""
    return max(1, min(wanted, descriptors_allowed() // 2))


def boot() -> str:
    """Names this boot of the machine. Where the system does not say, a new name each time, so that none is trusted."""
    if sys.platform == "darwin":
        return _darwin_boot_session()
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return f"unknown-{os.urandom(16).hex()}"


def host() -> str:
    """The name of this machine, as its users know it."""
    return os.uname().nodename


def user_and_host() -> str:
    """Who runs this process, and where: `anna@north`. The number of a user who has no name."""
    number = os.getuid()
    try:
        user = pwd.getpwuid(number).pw_name
    except KeyError:
        user = str(number)
    return f"{user}@{host()}"


def mount(path: str) -> str:
    """Names the mount that holds `path`: device number and, where the system says it, mount id.

    Asked for each shard that is opened, so by the descriptor: a look through the list of all mounts costs far more.
    """
    if sys.platform != "linux":
        return f"{os.stat(path).st_dev}"
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        device, number = os.fstat(fd).st_dev, _mount_of(fd)
    finally:
        os.close(fd)
    return f"{device}" if number is None else f"{device}.{number}"


def _mount_of(fd: int) -> str | None:
    """The id of the mount that an open file lies in, as `mountinfo` lists it; `None` where the system does not say."""
    try:
        info = os.open(f"/proc/self/fdinfo/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            # Else a shortage of descriptors would give the mount another name.
            raise
        return None
    try:
        fields = dict(line.partition(b":")[::2] for line in os.read(info, FDINFO_BYTES).splitlines())
    finally:
        os.close(info)
    number = fields.get(b"mnt_id")
    return None if number is None else number.strip().decode("ascii")


def mount_id(mountinfo: str, path: str) -> str | None:
    """The id of the mount with the longest mount point above `path`; of several on one point, the last is on top."""
    found, longest = None, -1
    lines = (line.split(" ") for line in mountinfo.splitlines())
    for number, point in [(fields[0], _unescape(fields[4])) for fields in lines if len(fields) >= 5]:
        holds = path == point or path.startswith(point.rstrip("/") + "/")
        if holds and len(point) >= longest:
            found, longest = number, len(point)
    return found


def _unescape(point: str) -> str:
    for escaped, plain in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        point = point.replace(escaped, plain)
    return point


def _kernel() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(character for character in minor if character.isdigit()) or "0")


def _darwin_boot_session() -> str:
    answer = ctypes.create_string_buffer(64)
    size = ctypes.c_size_t(len(answer))
    if ctypes.CDLL(None).sysctlbyname(b"kern.bootsessionuuid", answer, ctypes.byref(size), None, 0) != 0:
        return f"unknown-{os.urandom(16).hex()}"
    return answer.value.decode("ascii")
