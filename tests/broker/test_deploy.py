"""The files in deploy: dashboards and alerts use metrics that a broker has, unit and proxy fit the server."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from forebay.settings import ServerSettings
from tests.support.brokers import running_broker
from tests.support.commands import invoke

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Every name that a query may use."""
    with running_broker(tmp_path_factory.mktemp("deploy") / "data") as broker, broker.client() as client:
        client.put("/v1/topics/shop/orders", json={"durability": "fsync"})
        client.post("/v1/topics/shop/orders/records", json=[{"value": "x"}])
        text = client.get("/metrics").text
    found: set[str] = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        found |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"} if kind == "histogram" else {name}
    return found


def _used(expressions: list[str]) -> set[str]:
    return {name for text in expressions for name in re.findall(r"\bforebay_\w+", text)}


def _rules() -> list[dict[str, Any]]:
    read = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())
    return [rule for group in read["groups"] for rule in group["rules"]]


def test_alerts_use_metrics_that_there_are(names: set[str]) -> None:
    rules = _rules()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    # Whether a broker answers is a metric of Prometheus itself: of one that does not, there is no other.
    assert all(_used([rule["expr"]]) for rule in rules if "up{" not in rule["expr"])
    assert [rule["alert"] for rule in rules if "up{" in rule["expr"]] == ["ForebayDown"]
    assert _used([rule["expr"] for rule in rules]) - names == set()
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in rules)


def test_the_page_on_operations_says_what_to_do_about_each_alert() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    assert re.findall(r"^\| `(Forebay\w+)` \|", page, re.MULTILINE) == [rule["alert"] for rule in _rules()]


def test_the_dashboard_uses_metrics_that_there_are(names: set[str]) -> None:
    board = json.loads((DEPLOY / "grafana" / "forebay.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in board["templating"]["list"]]
    used = _used(queries)
    assert used - names == set()
    assert len(used) >= 20
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_unit_starts_a_command_that_there_is_and_waits_for_its_end() -> None:
    text = (DEPLOY / "systemd" / "forebay.service").read_text()
    unit = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    program, *words = shlex.split(unit["ExecStart"])
    assert Path(program).name == "forebay"
    assert invoke([*words, "--help"]).exit_code == 0
    assert unit["KillSignal"] == "SIGTERM"
    assert int(unit["TimeoutStopSec"]) * 1000 > ServerSettings().stop_timeout_ms
    assert unit["NoNewPrivileges"] == "yes"


def test_the_proxy_sends_events_as_they_come_and_waits_longer_than_the_server() -> None:
    text = (DEPLOY / "nginx" / "forebay.conf").read_text()
    watch = text.partition("location = /v1/watch {")[2].partition("}")[0]
    assert "proxy_buffering off;" in watch
    seconds = [int(found) for found in re.findall(r"proxy_read_timeout (\d+)s;", text)]
    settings = ServerSettings()
    assert min(seconds) * 1000 > max(settings.wait_timeout_max_ms, settings.heartbeat_interval_ms)
    assert f"127.0.0.1:{settings.port};" in text
    [size] = re.findall(r"client_max_body_size (\d+)m;", text)
    assert int(size) << 20 == settings.body_bytes_max
