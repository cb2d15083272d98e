"""Where topics are: said in options, the same on every machine, and no secret on the way there."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from forebay.bulk import SharedStore
from forebay.errors import Invalid, Unsupported
from forebay.settings import Settings
from forebay.spark.place.location import Location, is_about_place
from forebay.spark.place.reading import topics_with_history
from forebay.topics import TopicName, TopicSpec


def _parse(environment: dict[str, str] | None = None, **options: str) -> Location:
    return Location.parse({name.replace("__", "."): text for name, text in options.items()}, environment or {})


def test_a_path_is_enough_and_other_options_are_left_aside() -> None:
    location = _parse(path="/data", topic="orders", startingOffsets="earliest")

    assert location == Location(path="/data")
    assert location.settings({}) == Settings()
    assert pickle.loads(pickle.dumps(location)) == location


def test_relative_paths_become_absolute_where_the_options_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "forebay.yaml"
    file.write_text("metadata: {path: meta.sqlite}\nstorage: {mode: shared_fs}\nstore: {root: 'st${WORD}'}\n")

    location = Location.parse({"path": "data", "settings": "forebay.yaml"}, {"WORD": "ore"})
    monkeypatch.chdir("/")

    assert location.path == f"{tmp_path}/data"
    settings = location.settings({"WORD": "ore"})
    assert (settings.metadata.path, settings.store.root) == (f"{tmp_path}/meta.sqlite", f"{tmp_path}/store")


@pytest.mark.parametrize(
    ("store", "metadata", "root", "backend", "place"),
    [
        ("s3://bucket/a/b/", "sqlite:///meta.db", "bucket/a/b", "s3", "/meta.db"),
        ("s3a://bucket/a", "sqlite:///meta.db", "bucket/a", "s3", "/meta.db"),
        ("gs://bucket", "sqlite:///meta.db", "bucket", "gcs", "/meta.db"),
        ("az://box/p", "etcd://one:2379, two:2379/prod", "box/p", "azure", None),
        ("file:///history", "etcd://one:2379", "/history", "directory", None),
        ("file:///history", "etcds://one:2379,two:2379/prod", "/history", "directory", None),
    ],
)
def test_store_and_metadata_are_urls(store: str, metadata: str, root: str, backend: str, place: str | None) -> None:
    settings = _parse(store=store, metadata=metadata).settings({})

    assert (settings.store.backend, settings.store.root, settings.metadata.path) == (backend, root, place)
    assert settings.is_shared
    if place is None:
        scheme = "https" if metadata.startswith("etcds") else "http"
        members = ("one", "two") if "two" in metadata else ("one",)
        assert settings.metadata.endpoints == tuple(f"{scheme}://{member}:2379" for member in members)
        assert settings.metadata.prefix == ("/prod" if "prod" in metadata else "/forebay")


def test_options_go_before_variables_and_variables_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "forebay.yaml"
    file.write_text(
        "storage: {mode: object_store}\n"
        "store: {backend: s3, root: b, options: {endpoint: 'http://file', region: r, token: '${TOKEN}'}}\n"
        "wal: {flush_interval_ms: 1, sync_interval_ms: 1, mark_interval_ms: 1}\n"
    )
    environment = {"FOREBAY_WAL__SYNC_INTERVAL_MS": "2", "FOREBAY_WAL__MARK_INTERVAL_MS": "2", "TOKEN": "${x}"}
    options = {"path": "/d", "settings": str(file), "wal.mark_interval_ms": "3"}

    location = Location.parse({**options, "store.options.endpoint": "http://option"}, environment)

    settings = location.settings({"TOKEN": "${x}"})
    wal = settings.wal
    assert (wal.flush_interval_ms, wal.sync_interval_ms, wal.mark_interval_ms) == (1, 2, 3)
    assert settings.store.options == {"endpoint": "http://option", "region": "r", "token": "${x}"}
    assert location.variables == {"TOKEN"}


def test_secrets_of_the_environment_stay_there() -> None:
    environment = {"FOREBAY_STORE__OPTIONS": "access_key_id=abc,secret_access_key=hush"}

    location = Location.parse({"path": "/d", "store": "s3://bucket"}, environment)

    assert b"hush" not in pickle.dumps(location)
    assert location.variables == {"FOREBAY_STORE__OPTIONS"}
    assert location.settings(environment).store.options == {"access_key_id": "abc", "secret_access_key": "hush"}


def test_a_variable_that_is_missing_is_named_with_where_to_set_it() -> None:
    location = _parse({"KEY": "hush"}, path="/d", store="s3://b", store__options__secret_access_key="${KEY}")

    with pytest.raises(Invalid, match=r"/d refers to the environment variable KEY, .* spark.executorEnv.KEY"):
        location.settings({})


@pytest.mark.parametrize(
    "options",
    [
        {"store.options.secret_access_key": "hush"},
        {"store.options.account_key": "hush"},
        {"store.options": "endpoint=http://e, token=hush"},
        {"store.options.endpoint": "http://me:hush@host"},
        {"metadata.password": "hush", "metadata.user": "me"},
    ],
)
def test_a_secret_in_an_option_is_refused_and_not_repeated(options: dict[str, str]) -> None:
    with pytest.raises(Invalid, match="as plain text") as caught:
        Location.parse({"path": "/d", "store": "s3://b", **options}, {})

    assert "hush" not in str(caught.value)
    assert "spark.executorEnv." in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "store: {options: {secret_access_key: hush}}",
        "metadata: {password: hush}",
        "table: {options: {s3.endpoint: 'http://here', s3.secret-access-key: hush}}",
        "table: {options: 'token=hush'}",
    ],
)
def test_a_secret_in_the_file_is_refused_and_not_repeated(tmp_path: Path, text: str) -> None:
    file = tmp_path / "forebay.yaml"
    file.write_text(text)

    with pytest.raises(
        Invalid, match="settings file has (store.options|metadata.password|table.options) a secret"
    ) as caught:
        Location.of("/d", file)

    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, 'option "path" is missing'),
        ({"store": "s3://bucket"}, 'option "metadata" is missing'),
        ({"metadata": "sqlite:///m"}, 'option "path" is missing'),
        ({"store": "ftp://bucket"}, 'option "store" is .*: write s3://bucket/prefix'),
        ({"store": "file://relative"}, 'option "store" is'),
        ({"metadata": "/m"}, 'option "metadata" is .*: write sqlite:///file'),
        ({"path": "/d", "wal.sync_intervals": "1"}, "did you mean wal.sync_interval_ms"),
        ({"path": "/d", "wal.sync_interval_ms": "x"}, 'option "wal.sync_interval_ms": wal.sync_interval_ms is .x.'),
        ({"path": "/d", "settings": "/nowhere.yaml"}, "cannot read settings file /nowhere.yaml"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        Location.parse(options, {})


def test_user_in_a_url_is_not_repeated() -> None:
    with pytest.raises(Invalid) as caught:
        Location.parse({"path": "/d", "metadata": "etcd://me:hush@one:2379"}, {})

    assert "hush" not in str(caught.value)


def test_what_only_its_owner_has_is_refused() -> None:
    with pytest.raises(Unsupported, match="memory of its owner"):
        Location.parse({"path": ":memory:"}, {})


def test_a_broker_names_the_store_and_options_go_before_it() -> None:
    place = SharedStore(
        name="s3:b/x", mode="object_store", backend="s3", root="b/x", options={"region": "eu", "endpoint": "http://s3"}
    )
    environment = {"FOREBAY_STORE__OPTIONS": "secret_access_key=hush", "FOREBAY_STORE__ROOT": "elsewhere"}
    given = {"broker": "http://one:7878/", "store.options.endpoint": "http://here", "tokenEnv": "TOKEN"}
    location = Location.parse(given, environment)

    found = pickle.loads(pickle.dumps(location.with_store(place)))

    assert (found.broker, found.store_name, str(found)) == (
        "http://one:7878",
        "s3:b/x",
        "the broker at http://one:7878",
    )
    assert "hush" not in repr(found)
    settings = found.settings(environment)
    assert (settings.is_shared, settings.store.backend, settings.store.root) == (True, "s3", "b/x")
    assert settings.store.options == {"region": "eu", "endpoint": "http://here", "secret_access_key": "hush"}
    assert location.with_store(None) == location
    assert not location.settings(environment).is_shared
    assert found.variables >= {"TOKEN"}
    shared = SharedStore(name="directory", mode="shared_fs", backend="directory", root="/mnt/history")
    assert location.with_store(shared).settings(environment).store.root == "/mnt/history"


def test_options_that_say_where_are_distinguished_from_others() -> None:
    assert [is_about_place(name) for name in ("path", "store", "wal.dir", "topic")] == [True, True, True, False]


def test_a_topic_that_is_named_in_two_ways_is_taken_once() -> None:
    spec = TopicSpec(namespace="default", topic="a", topic_id="0" * 32, partitions=1, generation=1)
    asked: list[TopicName] = []

    def one(name: TopicName) -> TopicSpec:
        asked.append(name)
        return spec

    assert topics_with_history(["a", "/default/a", "default/a"], list, one) == [spec]
    assert asked == [TopicName("default", "a")]
