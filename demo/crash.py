"""A writer that is killed in the middle of its work, and the check that nothing it was promised is gone."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass

import forebay

WRITER = """
import sys, threading
import forebay

log = forebay.open(sys.argv[1])
payments = log.topic("shop/payments")

def write(thread):
    number = 0
    while True:
        offset = payments.append(b"payment %d of thread %d" % (number, thread), key=b"%d" % thread)
        sys.stdout.write(f"{offset} {thread} {number}\\n")
        sys.stdout.flush()
        number += 1

for thread in range(4):
    threading.Thread(target=write, args=(thread,), daemon=True).start()
threading.Event().wait()
"""


@dataclass(frozen=True)
class Crash:
    """What the killed writer had been promised, and what was there afterwards."""

    acknowledged: int
    recovered: int
    lost: int
    decision: str


def kill_a_writer(path: str, after: int) -> Crash:
    """Start a writer with class `fsync`, kill it with -9 after so many acknowledgements, open and compare."""
    child = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    promised: dict[int, bytes] = {}
    for line in child.stdout:
        offset, thread, number = line.split()
        promised[int(offset)] = b"payment %s of thread %s" % (number.encode(), thread.encode())
        if len(promised) == after:
            child.send_signal(signal.SIGKILL)
    child.wait()
    with forebay.open(path) as log:
        payments = log.topic("shop/payments")
        found = {record.offset: record.value for record in payments.read()}
        decision = str(payments.recovery())
    lost = sum(found.get(offset) != value for offset, value in promised.items())
    return Crash(len(promised), len(found), lost, decision)
