"""The commands of the broker's guide work as written, against a broker at another address."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import forebay
from tests.support.brokers import RunningBroker, running_broker

_PAGE: Final = Path(__file__).parents[2] / "docs" / "broker.md"
_SUBSCRIPTIONS: Final = _PAGE.with_name("subscriptions.md")
_BLOCK: Final = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMANDS: Final = [
    line.removeprefix("$ ")
    for block in _BLOCK.findall(_PAGE.read_text())
    for line in block.splitlines()
    if line.startswith("$ ")
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, RunningBroker]]:
    path = tmp_path_factory.mktemp("guide")
    with running_broker(path / "data") as broker:
        yield path, broker


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in _COMMANDS if not command.startswith("forebay serve")])
def test_a_command_of_the_guide_works(served: tuple[Path, RunningBroker], command: str) -> None:
    path, broker = served
    with broker.client() as client:
        # Each command works by itself, too: what the page does before it is there.
        client.put("/v1/topics/shop/orders", json={"partitions": 2, "durability": "fsync", "exist_ok": True})
        client.put("/v1/topics/shop/orders/subscriptions/billing", json={"mode": "shared", "start": "earliest"})
        client.put("/v1/topics/shop/orders/subscriptions/billing/consumers/worker-1")
        client.put("/v1/topics/shop/orders-eu", json={"exist_ok": True})
        if '"sources"' in command:
            client.delete("/v1/routers/eu")
        else:
            client.put("/v1/routers/eu", json={"sources": ["shop/orders"], "destination": "shop/orders-eu"})
    here = command.replace("http://127.0.0.1:7878", broker.url)
    if "-X PUT" in here and "subscriptions" not in here and "routers" not in here:
        here = here.replace("shop/orders", "shop/first")
    ended = subprocess.run(
        ["bash", "-c", f'export PATH="{Path(sys.executable).parent}:$PATH"; {here}'],
        cwd=path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout, "it says something"
    assert '"error"' not in ended.stdout, ended.stdout


def test_the_commands_of_the_page_on_subscriptions_work_in_order(served: tuple[Path, RunningBroker]) -> None:
    """On a topic of its own, from the first to the last."""
    path, broker = served
    (script,) = re.findall(r"^```sh\n(.*?)^```$", _SUBSCRIPTIONS.read_text(), re.MULTILINE | re.DOTALL)
    here = script.replace("http://127.0.0.1:7878", broker.url).replace("shop/orders", "shop/subscribed")
    here = here.replace("curl ", "curl -sS --fail-with-body -w '\\n' ")
    ended = subprocess.run(["bash", "-ec", here], cwd=path, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    answers = [json.loads(line) for line in ended.stdout.splitlines() if line]
    pulled = [[each["attempt"] for each in answer["records"]] for answer in answers if "records" in answer]
    assert pulled == [[1, 1], [2, 1]]
    assert {"counted": 2} in answers
    assert answers[-1]["partitions"][0]["lag"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("example", re.findall(r"^```python\n(.*?)^```$", _PAGE.read_text(), re.MULTILINE | re.DOTALL))
def test_an_example_of_the_guide_runs(
    served: tuple[Path, RunningBroker], example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"__name__": "__main__", "forebay": forebay}
    exec(compile(example.replace("http://127.0.0.1:7878", served[1].url), _PAGE.name, "exec"), names)
    assert capsys.readouterr().out
