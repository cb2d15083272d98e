"""Every command finds ./data where neither `--data` nor FOREBAY_DATA names a directory, with and without settings."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

import forebay
from forebay.cli.doctor import probes
from forebay.cli.options import DIRECTORY_VARIABLE
from forebay.format.metadata.keys import token_key
from forebay.format.metadata.value import encode_value
from forebay.metadata import Put
from forebay.routers import Routers
from forebay.service.principals import AccessScope
from forebay.service.tokens import AccessToken
from forebay.settings import Settings
from forebay.spark.start.java import Java
from forebay.testing.inside import inside
from tests.cli.test_help_and_docs import COMMANDS
from tests.support.commands import invoke

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WORDS: Final = {
    "produce": "shop/orders more.txt",
    "consume": "shop/orders",
    "du": "",
    "dump": "",
    "verify": "",
    "repair": "",
    "doctor": "",
    "top": "--once",
    "topic create": "shop/more",
    "topic list": "",
    "topic delete": "shop/orders --yes",
    "topic show": "shop/orders",
    "topic alter": "shop/orders --partitions 2",
    "topic copy": "shop/orders shop/copy",
    "topic seal": "shop/orders",
    "shard take-over": "shop/orders[0] --accept-loss",
    "topic unseal": "shop/sealed",
    "topic export": "shop/orders",
    "shard list": "",
    "shard status": "shop/orders",
    "shard salvage": "shop/orders --from data --list",
    "records get": "shop/orders --key k",
    "records delete": "shop/orders --before 1 --yes",
    "records erase": "shop/orders --key k --yes",
    "group list": "",
    "group show": "readers",
    "group reset": "readers shop/orders --to earliest",
    "group delete": "readers --yes",
    "subscription create": "shop/orders auditing",
    "subscription list": "",
    "subscription show": "shop/orders mails",
    "subscription alter": "shop/orders mails --ack-timeout-ms 60000",
    "subscription pause": "shop/orders mails",
    "subscription resume": "shop/orders mails",
    "subscription seek": "shop/orders mails --to earliest",
    "subscription peek": "shop/orders mails",
    "subscription consume": "shop/orders mails",
    "subscription delete": "shop/orders mails --yes",
    "deadletter list": "shop/orders mails",
    "deadletter show": "shop/orders mails --letter 0:0",
    "deadletter replay": "shop/orders mails --all",
    "deadletter purge": "shop/orders mails --all --yes",
    "router create": "copies shop/orders --to shop/copies",
    "router alter": "copying --tag eu",
    "router pause": "copying",
    "router resume": "copying",
    "router delete": "copying --yes",
    "router list": "",
    "router status": "copying",
    "token create": "billing --scope read --topics shop/",
    "token list": "",
    "token revoke": "0123456789abcdef",
    "token prune": "",
    "pipeline run": "p.yml --dry-run",
    "pipeline plan": "p.yml",
    "table register": "shop/orders --dry-run",
}
ON_SPARK: Final = {
    "history compact": "--dry-run",
    "history scrub": "--dry-run",
    "table lake": "shop/orders --to lake --format raw --dry-run",
    "history backfill": "shop/orders --from {home}/more.txt --format text --dry-run",
    "history migrate": "--to new.yaml --dry-run",
    "history reindex": "--dry-run",
    "history profile": "shop/orders --dry-run",
}
TOKEN: Final = AccessToken(
    token_id=WORDS["token revoke"],
    name="billing",
    secret_sha256="0" * 64,
    scopes=(AccessScope.READ,),
    prefixes=("shop/",),
    created_at=0,
)
SETTINGS: Final = ((), ("--settings", "local.yaml"))
FILES: Final = {
    "more.txt": "one\n",
    "local.yaml": "wal: {free_bytes_min: 0}\n",
    "new.yaml": "storage: {mode: shared_fs}\nstore: {root: new}\n",
    "p.yml": """\
name: p
sources: [{name: orders, topic: shop/orders, format: raw}]
sinks: [{name: out, from: orders, table: out}]
""",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    with forebay.open(str(root / "data"), {"wal": {"free_bytes_min": 0}}) as log:
        log.create_topic("shop/orders").append_many([b"1", b"2"], keys=[b"k", b"l"])
        log.create_topic("shop/copies")
        Routers(log).create("copying", sources=["shop/orders"], destination="shop/copies")
        log.create_topic("shop/sealed")
        log.seal_topic("shop/sealed")
        log.group("readers").commit("shop/orders", 1)
        inside(log).metadata.transaction([], [Put(token_key(TOKEN.token_id), encode_value(TOKEN))])
    words = "subscription create shop/orders mails --from earliest --deliveries-max 1 --on-spent dead-letter"
    for line in (words, "subscription consume shop/orders mails --count 1 --nack"):
        assert invoke([*line.split(), "--data", str(root / "data")]).exit_code == 0
    for name, text in FILES.items():
        (root / name).write_text(text)
    return root


@pytest.fixture
def home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to work in: it has a data directory by the usual name."""
    shutil.copytree(made, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setattr(probes, "usable_java", lambda environment: Java(Path("/java"), 21, "PATH", ()))
    return tmp_path / "home"


def test_each_command_is_tried() -> None:
    # A move names two directories, servers and routers run until they are stopped, a check of a server has none.
    apart = ["conformance", "router run", "serve", "topic move"]
    assert sorted([*WORDS, *ON_SPARK, *apart]) == sorted(" ".join(path) for path, _ in COMMANDS)


def _taken(words: str, settings: Sequence[str]) -> str:
    """What a command that names no data directory says; it must succeed."""
    result = invoke([*words.split(), *settings])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=["bare", "settings"])
@pytest.mark.parametrize("path", WORDS)
@pytest.mark.usefixtures("home")
def test_a_command_takes_the_usual_directory(path: str, settings: Sequence[str]) -> None:
    _taken(f"{path} {WORDS[path]}", settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=["bare", "settings"])
@pytest.mark.usefixtures("home")
def test_a_move_takes_the_usual_directory(settings: Sequence[str]) -> None:
    result = invoke(["topic", "move", "shop/orders", "--to", "other", *settings])

    assert result.exit_code == 2
    assert "the two directories share no metadata store" in result.stderr


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.parametrize("settings", SETTINGS, ids=["bare", "settings"])
def test_a_job_takes_the_usual_directory(home: Path, spark: SparkSession, settings: Sequence[str]) -> None:
    for path, words in ON_SPARK.items():
        assert _taken(f"{path} {words.format(home=home)}", settings), path


@pytest.mark.usefixtures("home")
def test_a_settings_file_that_names_store_and_metadata_needs_no_directory(home: Path) -> None:
    """The usual directory is not taken then: it may be one of many that share the store."""
    text = "storage: {mode: shared_fs}\nstore: {root: store}\nmetadata: {path: shared.sqlite}\n"
    (home / "shared.yaml").write_text(text)
    with forebay.open("one", Settings.load("shared.yaml")) as log:
        log.create_topic("shop/shared").append(b"1")
        log.export_topic("shop/shared")

    assert "shop/shared[0]" in _taken("table register shop/shared --dry-run", ("--settings", "shared.yaml"))


@pytest.mark.usefixtures("home")
def test_a_settings_file_without_metadata_means_that_of_the_usual_directory(home: Path) -> None:
    (home / "shared.yaml").write_text("storage: {mode: shared_fs}\nstore: {root: store}\n")

    assert "shop/orders[0]" in _taken("table register shop/orders --dry-run", ("--settings", "shared.yaml"))
