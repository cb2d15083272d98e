"""Tests that share what is costly run on one worker."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.shares import share_of

_ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("file", "share"),
    [
        ("tests/spark/test_source.py", "spark"),
        ("tests/docs/test_examples.py", "spark"),
        ("tests/spark/cluster/test_clusters.py", "clusters"),
        ("tests/metadata/etcd/test_etcd_leases.py", "etcd"),
        ("tests/history/test_sinks.py", "etcd"),
        ("tests/blobs/test_blob_contract.py", "blob-servers"),
        ("tests/moves/test_owners.py", "moves-servers"),
        ("tests/broker/test_rights.py", "tests/broker/test_rights.py"),
        ("tests/test_shares.py", "tests/test_shares.py"),
    ],
)
def test_files_that_use_the_same_costly_thing_are_one_share(file: str, share: str) -> None:
    assert share_of(f"{file}::TestKind::test_claim[a::b]") == share


@pytest.mark.slow
def test_a_file_runs_on_one_worker_of_a_run_with_two() -> None:
    """xdist's own groups had ceased to work with a later pytest, unnoticed: Spark and all servers ran twice."""
    files = ["tests/test_naming.py", "tests/test_reading.py", "tests/test_clock.py"]
    words = ["-n", "2", "--dist", "loadgroup", "-v", "-p", "no:cacheprovider", *files]

    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=_ROOT, capture_output=True, text=True, check=False
    )

    workers = defaultdict(set)
    for worker, file in re.findall(r"^\[(gw\d)\].*?(tests/\w+\.py)::", ended.stdout, re.MULTILINE):
        workers[file].add(worker)
    assert set(workers) == set(files), ended.stdout + ended.stderr
    assert [file for file, seen in workers.items() if len(seen) > 1] == []
    assert len(set.union(*workers.values())) == 2
