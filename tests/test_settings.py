"""Settings: where they come from, which source wins, and what a refusal says."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import msgspec
import pytest

import forebay
from forebay.errors import Invalid, Unsupported
from forebay.settings import FILE_BYTES_MAX, MIB, Setting, Settings, WalSettings, all_settings, settings_of
from tests.support.tools import tool

ROOT = Path(__file__).parent.parent


def load_file(directory: Path, text: str, environment: dict[str, str] | None = None) -> Settings:
    path = directory / "forebay.yaml"
    path.write_text(text, encoding="utf-8")
    return Settings.load(str(path), environment=environment or {})


def test_unless_told_otherwise_the_environment_is_that_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("metadata: {prefix: '${INSTALLATION}'}\nwal: {sync_interval_ms: 5}")
    monkeypatch.setenv("INSTALLATION", "/mine")
    monkeypatch.setenv("FOREBAY_WAL__SYNC_INTERVAL_MS", "7")

    settings = Settings.load(file)

    assert (settings.metadata.prefix, settings.wal.sync_interval_ms) == ("/mine", 7)
    with forebay.open(":memory:") as by_variable, forebay.open(":memory:", Settings()) as as_told:
        assert (by_variable.settings.wal.sync_interval_ms, as_told.settings.wal.sync_interval_ms) == (7, 1000)


def test_nothing_given_means_defaults() -> None:
    assert Settings.load() == Settings()
    assert Settings().wal.sync_interval_ms == 1_000
    assert Settings().wal.frame_bytes_max == 8 * MIB
    assert Settings().metadata.prefix == "/forebay"


def test_later_sources_win(tmp_path: Path) -> None:
    path = tmp_path / "forebay.yaml"
    path.write_text("wal: {flush_interval_ms: 1, sync_interval_ms: 1, mark_interval_ms: 1}\n", encoding="utf-8")

    settings = Settings.load(
        str(path),
        overrides={"wal": {"mark_interval_ms": 3}},
        environment={"FOREBAY_WAL__SYNC_INTERVAL_MS": "2", "FOREBAY_WAL__MARK_INTERVAL_MS": "2"},
    )

    assert (settings.wal.flush_interval_ms, settings.wal.sync_interval_ms, settings.wal.mark_interval_ms) == (1, 2, 3)
    assert settings.wal.rotate_bytes_max == WalSettings().rotate_bytes_max


@pytest.mark.parametrize("text", ["", "# nothing\n", "wal:\n", "wal: {}\n", "{}"])
def test_empty_files_and_groups_mean_defaults(tmp_path: Path, text: str) -> None:
    assert load_file(tmp_path, text) == Settings()


def test_variables_are_expanded_in_file_and_overrides_but_not_in_variables(tmp_path: Path) -> None:
    environment = {"DIR": "/srv/${X}", "MS": "7", "FOREBAY_METADATA__PREFIX": "/p"}

    settings = load_file(tmp_path, "metadata: {path: '${DIR}/$${m}'}\nwal: {sync_interval_ms: '${MS}'}", environment)

    assert settings.metadata.path == "/srv/${X}/${m}"
    assert settings.metadata.prefix == "/p"
    assert settings.wal.sync_interval_ms == 7
    overrides = {"metadata": {"path": "${MS}"}}
    assert Settings.load(overrides=overrides, environment={"MS": "7"}).metadata.path == "7"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("${NOWHERE}/x", "environment variable NOWHERE, which is not set"),
        ("${", "names no variable; write \\${NAME}"),
        ("a${B C}", "'\\${B C}' names no variable"),
        ("${}", "names no variable"),
    ],
)
def test_a_bad_reference_is_named(path: str, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        Settings.load(overrides={"metadata": {"path": path}})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"wal": {"sync_intervall_ms": 1}}, "overrides: wal.sync_intervall_ms .* did you mean wal.sync_interval_ms\\?"),
        ({"wall": {"sync_interval_ms": 1}}, "overrides: wall .* did you mean wal\\?"),
        ({"sync_interval_ms": 1}, "sync_interval_ms .* did you mean wal.sync_interval_ms\\?"),
        (
            {"xyzzy": 1},
            "xyzzy is not a setting; the groups are storage, wal, memory, metadata, store, export, retention, progress",
        ),
        ({7: {}}, "7 is not a setting"),
        ({"wal": {None: 1}}, "wal.None is not a setting"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(tree: dict[str, object], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        Settings.load(overrides=tree)


def test_an_unknown_variable_with_a_double_underscore_is_refused_and_others_are_not_ours() -> None:
    with pytest.raises(Invalid, match="the environment: wal.sync_ms .* did you mean wal.sync_interval_ms"):
        Settings.load(environment={"FOREBAY_WAL__SYNC_MS": "1"})
    assert Settings.load(environment={"FOREBAY_SERVICE_HOST": "10.0.0.1", "HOME": "/", "X__Y": "1"}) == Settings()


@pytest.mark.parametrize("value", [0, 600_001, -1, 2**70, "x", "", "1.5", 1.5, True, None, [1], {"a": 1}])
def test_a_value_out_of_range_is_named_with_path_value_and_range(value: object) -> None:
    with pytest.raises(Invalid) as refusal:
        Settings.load(overrides={"wal": {"sync_interval_ms": value}})

    expected = f"overrides: wal.sync_interval_ms is {value!r}; allowed: 1 to 600000 milliseconds"
    assert str(refusal.value) == expected


@pytest.mark.parametrize(
    ("group", "name", "value", "message"),
    [
        ("metadata", "backend", "paper", "metadata.backend is 'paper'; allowed: sqlite or memory or etcd"),
        ("metadata", "prefix", "forebay", "metadata.prefix is 'forebay'; allowed: one to eight parts"),
        ("metadata", "prefix", "/a/", "metadata.prefix is '/a/'"),
        ("metadata", "prefix", "/a\n", "metadata.prefix is"),
        ("metadata", "path", 7, "metadata.path is 7; allowed: text, or left out"),
    ],
)
def test_texts_are_checked_too(group: str, name: str, value: object, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        Settings.load(overrides={group: {name: value}})


@pytest.mark.parametrize("setting", all_settings(), ids=lambda setting: setting.path)
def test_every_range_holds_at_its_ends_and_not_beyond(setting: Setting) -> None:
    if setting.meta.ge is None or setting.meta.le is None:
        return
    low, high = int(setting.meta.ge), int(setting.meta.le)

    for value in (low, high, setting.default):
        assert setting.parse(value, source="test", strict=True) == value
    for value in (low - 1, high + 1):
        with pytest.raises(Invalid, match=setting.path):
            Settings.load(environment={setting.environment_name: str(value)})


def test_settings_made_in_code_are_checked_too() -> None:
    with pytest.raises(Invalid, match="wal.sync_interval_ms is 0"):
        WalSettings(sync_interval_ms=0)
    with pytest.raises(Invalid, match="wal.sync_interval_ms is 0"):
        msgspec.structs.replace(WalSettings(), sync_interval_ms=0)
    with pytest.raises(Invalid, match="reframe_bytes_min is 8192, above wal.reframe_bytes_max 4096"):
        Settings.load(overrides={"wal": {"reframe_bytes_min": 8192, "reframe_bytes_max": 4096}})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"backend": "etcd"}, "without metadata.endpoints: name its members"),
        ({"endpoints": ["localhost:2379"]}, "names 'localhost:2379'; write http://host:port"),
        ({"endpoints": ["http://a:1/path"]}, "write http://host:port"),
        ({"endpoints": 7}, "metadata.endpoints is 7; allowed: texts"),
        ({"lease_ttl_s": 5, "lease_margin_s": 5}, "lease_margin_s is 5, not below metadata.lease_ttl_s 5"),
        ({"tls_cert": "c.pem"}, "tls_cert and metadata.tls_key go together"),
        ({"password": "p"}, "user and metadata.password go together"),
    ],
)
def test_what_contradicts_itself_about_etcd_is_refused(metadata: dict[str, object], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        Settings.load(overrides={"metadata": metadata})


def test_endpoints_are_a_list_in_a_file_and_parted_by_commas_in_a_variable(tmp_path: Path) -> None:
    expected = ("http://a:2379", "https://[::1]:2379")

    filed = load_file(tmp_path, "metadata: {endpoints: ['http://${H}:2379', 'https://[::1]:2379']}", {"H": "a"})
    variable = Settings.load(environment={"FOREBAY_METADATA__ENDPOINTS": " http://a:2379, https://[::1]:2379,"})

    assert filed.metadata.endpoints == variable.metadata.endpoints == expected


def test_a_password_is_shown_nowhere() -> None:
    settings = Settings.load(
        overrides={"metadata": {"user": "u", "password": "${P}"}}, environment={"P": "correct horse"}
    )

    assert settings.metadata.password == "correct horse"
    assert "horse" not in repr(settings) + str(settings) + repr(settings.metadata.__rich_repr__())
    assert "password='(hidden)'" in repr(settings)
    assert "password=None" in repr(Settings())
    with pytest.raises(Invalid, match="metadata.password is \\(hidden\\)") as refusal:
        Settings.load(overrides={"metadata": {"password": ["correct horse"]}})
    assert "horse" not in str(refusal.value)


@pytest.mark.parametrize(
    "groups",
    [
        {"store": {"backend": "s3", "root": "b", "options": {"secret_access_key": "hush"}}},
        {"store": {"backend": "s3", "root": "b"}, "table": {"options": {"token": "hush"}}},
        {"store": {"backend": "s3", "root": "b"}, "metadata": {"user": "u", "password": "hush"}},
    ],
)
def test_secrets_are_not_pickled(groups: dict[str, object]) -> None:
    settings = Settings.load(overrides={"storage": {"mode": "object_store"}, **groups})

    with pytest.raises(Unsupported, match="may hold secrets and is not pickled: load the settings") as refusal:
        pickle.dumps(settings)

    assert "hush" not in str(refusal.value)
    assert pickle.loads(pickle.dumps(Settings())) == Settings()
    assert copy.deepcopy(settings) == settings, "that stays here"


def test_no_variable_of_whoever_runs_the_tests_counts() -> None:
    assert Settings.load() == Settings()


def test_options_of_a_store_are_expanded_parted_and_never_shown(tmp_path: Path) -> None:
    text = "storage: {mode: object_store}\n"
    text += "store: {backend: s3, root: b/p, options: {region: eu, secret_access_key: '${KEY}', allow_http: true}}"

    store = load_file(tmp_path, text, {"KEY": "hush"}).store

    assert store.options == {"region": "eu", "secret_access_key": "hush", "allow_http": True}
    assert "hush" not in repr(store)
    variables = {
        "FOREBAY_STORAGE__MODE": "object_store",
        "FOREBAY_STORE__BACKEND": "gcs",
        "FOREBAY_STORE__ROOT": "b",
        "FOREBAY_STORE__OPTIONS": "a=1, b=x=y",
    }
    assert Settings.load(environment=variables).store.options == {"a": "1", "b": "x=y"}


@pytest.mark.parametrize("options", ["hush", ["hush"], {"key": ["hush"]}, {"key": {"hush": "${hush}"}}, {"key": None}])
def test_options_of_a_wrong_shape_are_refused_without_showing_them(options: object) -> None:
    with pytest.raises(Invalid, match="store.options is \\(hidden\\); allowed: names with values") as refusal:
        Settings.load(overrides={"store": {"backend": "s3", "root": "b", "options": options}})

    assert "hush" not in str(refusal.value)


def test_a_bucket_is_asked_for_and_options_belong_to_services() -> None:
    with pytest.raises(Invalid, match='store.backend is "azure" without store.root'):
        Settings.load(overrides={"store": {"backend": "azure"}})
    with pytest.raises(Invalid, match='store.options belong to s3, gcs and azure; store.backend is "memory"'):
        Settings.load(overrides={"store": {"backend": "memory", "options": {"region": "eu"}}})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"store": {"root": "/srv"}}, 'storage.mode is "local", which has no store: leave the group store out'),
        ({"retention": {"time_s": 5}}, 'storage.mode is "local", which has no retention'),
        ({"export": {"interval_s": 5}}, 'storage.mode is "local", which has no export'),
        ({"storage": {"mode": "shared_fs"}}, 'storage.mode is "shared_fs" without store.root'),
        ({"storage": {"mode": "shared_fs"}, "store": {"backend": "s3", "root": "b"}}, 'use "directory"'),
        ({"storage": {"mode": "object_store"}, "store": {"root": "/srv"}}, 'use "s3", "gcs" or "azure"'),
        ({"storage": {"mode": "object_store", "handoff_root": "/srv"}}, 'storage.handoff_root belongs to mode "local"'),
    ],
)
def test_a_mode_asks_for_what_it_needs_and_refuses_what_it_has_not(tree: dict[str, object], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        Settings.load(overrides=tree)


def test_each_mode_can_be_chosen() -> None:
    shared = Settings.load(overrides={"storage": {"mode": "shared_fs"}, "store": {"root": "/srv"}})
    bucket = {"storage": {"mode": "object_store"}, "store": {"backend": "s3", "root": "b/p"}}

    assert shared.is_shared and Settings.load(overrides=bucket).is_shared
    assert not Settings.load(overrides={"storage": {"handoff_root": "/srv"}}).is_shared
    assert not Settings.load(overrides={"retention": {"evict_interval_s": 5}}).is_shared
    assert shared.retention.time_s == 86_400 and shared.retention.bytes_max == 10 * 1024**3
    assert shared.export.interval_s == 300 and shared.retention.check_interval_s == 300


@pytest.mark.parametrize(
    ("backend", "root", "place"),
    [
        (None, "s3://bucket", ("s3", "bucket")),
        (None, "s3://bucket/", ("s3", "bucket")),
        (None, "s3://bucket/some/prefix/", ("s3", "bucket/some/prefix")),
        (None, "s3a://bucket/prefix", ("s3", "bucket/prefix")),
        (None, "S3://bucket/prefix", ("s3", "bucket/prefix")),
        (None, "gs://bucket/prefix", ("gcs", "bucket/prefix")),
        (None, "az://container/prefix", ("azure", "container/prefix")),
        ("s3", "s3://bucket/prefix", ("s3", "bucket/prefix")),
        ("gcs", "gs://bucket", ("gcs", "bucket")),
        ("azure", "az://container", ("azure", "container")),
        ("s3", "bucket/prefix", ("s3", "bucket/prefix")),
        ("s3", "bucket/prefix/", ("s3", "bucket/prefix/")),  # as it stands: the catalog calls the store so
    ],
)
def test_a_bucket_may_be_written_as_a_url(backend: str | None, root: str, place: tuple[str, str]) -> None:
    store = {"root": root} | ({} if backend is None else {"backend": backend})

    settings = Settings.load(overrides={"storage": {"mode": "object_store"}, "store": store})

    assert (settings.store.backend, settings.store.root) == place
    assert settings.store.name == f"{place[0]}:{place[1]}"
    assert copy.deepcopy(settings) == settings


@pytest.mark.parametrize(
    ("root", "path"),
    [
        ("/srv/history", "/srv/history"),
        ("/srv/history/", "/srv/history/"),
        ("history", "history"),
        ("file:///srv/history", "/srv/history"),
        ("file:/srv/history", "/srv/history"),
        ("file://localhost/srv/history", "/srv/history"),
    ],
)
def test_a_directory_may_be_written_as_a_url(root: str, path: str) -> None:
    shared = Settings.load(overrides={"storage": {"mode": "shared_fs"}, "store": {"root": root}})
    local = Settings.load(overrides={"storage": {"handoff_root": root}})

    assert (shared.store.backend, shared.store.root) == ("directory", path)
    assert local.storage.handoff_root == path


@pytest.mark.parametrize(
    ("mode", "backend", "root", "message"),
    [
        ("object_store", "s3", "gs://b/p", """'gs://b/p' and store.backend is "s3": set store.backend to "gcs\""""),
        ("object_store", "s3", "/", """'/', which names no bucket.*: write bucket/prefix, or s3://bucket/prefix"""),
        ("object_store", "gcs", "/b/p", "'/b/p', which names no bucket.*gs://bucket/prefix"),
        ("object_store", "s3", "s3:/b", "'s3:/b', which names no bucket: write s3://bucket/prefix"),
        ("object_store", None, "s3://", "'s3://', which names no bucket: write s3://bucket/prefix"),
        ("object_store", None, "s3:///p", "'s3:///p', which names no bucket"),
        ("object_store", "s3", "s3:b", "'s3:b', which names no bucket"),
        ("object_store", "s3", "https://b.s3.amazonaws.com/p", "which names no bucket"),
        ("object_store", "azure", "abfss://c@account/p", "which names no bucket.*az://bucket/prefix"),
        ("object_store", "s3", "file:///srv", "'file:///srv', which names no bucket"),
        ("object_store", None, "file:///srv", 'use "s3", "gcs" or "azure", or set storage.mode to "shared_fs"'),
        ("object_store", "s3", "", 'store.backend is "s3" without store.root: name the bucket as bucket/prefix'),
        ("object_store", "s3", "  ", 'store.backend is "s3" without store.root'),
        ("object_store", None, None, 'use "s3", "gcs" or "azure"'),
        ("shared_fs", None, "s3://b/p", 'use "directory", or set storage.mode to "object_store"'),
        ("shared_fs", None, "/", "'/', the whole file system: name a directory in it"),
        ("shared_fs", None, "//", "'//', the whole file system"),
        ("shared_fs", None, "file:///", "'file:///', the whole file system"),
        ("shared_fs", None, "file://server/srv", "names no path of this machine: write file:///path"),
        ("shared_fs", None, "hdfs://name/srv", "'hdfs://name/srv', which Forebay does not know: write a path"),
        ("shared_fs", None, "", 'storage.mode is "shared_fs" without store.root'),
        ("shared_fs", None, " ", 'storage.mode is "shared_fs" without store.root'),
    ],
)
def test_a_store_that_could_mean_two_things_is_refused_by_its_name(
    mode: str, backend: str | None, root: str | None, message: str
) -> None:
    store = {name: value for name, value in (("backend", backend), ("root", root)) if value is not None}

    with pytest.raises(Invalid, match=message):
        Settings.load(overrides={"storage": {"mode": mode}, "store": store})


@pytest.mark.parametrize("root", ["s3://bucket/prefix", "gs://b", "/", "file:///"])
def test_a_directory_to_hand_topics_over_in_is_a_directory(root: str) -> None:
    with pytest.raises(Invalid, match=f"storage.handoff_root is '{root}', "):
        Settings.load(overrides={"storage": {"handoff_root": root}})


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(Invalid, match="credentials belong into store.options") as refusal:
        Settings.load(overrides={"storage": {"mode": "object_store"}, "store": {"root": "s3://me:hush@bucket/p"}})

    assert "hush" not in str(refusal.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_server_on_a_loopback_address_may_go_without_tokens(host: str) -> None:
    assert Settings.load(overrides={"server": {"host": host}}).server.is_loopback


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.7", "example.org", "localhost.example.org", "127.0.0.1.example"]
)
def test_a_server_that_others_reach_asks_for_tokens_unless_it_is_to_be_open(host: str) -> None:
    with pytest.raises(Invalid, match='set server.access to "tokens", or to "open" if that is meant'):
        Settings.load(overrides={"server": {"host": host}})

    for access in ("tokens", "open"):
        server = Settings.load(overrides={"server": {"host": host, "access": access}}).server
        assert not server.is_loopback


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"tls_cert": "c.pem"}, "server.tls_cert and server.tls_key go together"),
        ({"requests_max": 10}, "requests_per_principal_max is 1024, above server.requests_max 10: lower the first"),
        ({"streams_max": 10}, "streams_per_principal_max is 1000, above server.streams_max 10"),
        ({"topics_max": 10}, "topics_per_principal_max is 10000, above server.topics_max 10"),
        ({"connections_max": 10}, "connections_per_address_max is 1000, above server.connections_max 10"),
        ({"bytes_in_flight_max": MIB}, "bytes_in_flight_per_principal_max is .*, above server.bytes_in_flight_max"),
        ({"body_bytes_max": 128 * MIB}, "body_bytes_max is .*, above server.bytes_in_flight_per_principal_max"),
        ({"host": ""}, "server.host is ''"),
        ({"access": "anyone"}, "server.access is 'anyone'; allowed: tokens or loopback or open"),
    ],
)
def test_a_server_that_contradicts_itself_is_refused(server: dict[str, object], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        Settings.load(overrides={"server": server})


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Settings().wal.sync_interval_ms = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wal: [1", "is not YAML"),
        ("wal: {sync_interval_ms: 1}\nwal: {}\n", "wal is given twice"),
        ("- wal\n", "not groups of settings"),
        ("wal: 3\n", "wal is 3, not a group such as wal.dir"),
        ("\x00", "is not YAML"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
        ("? [a]\n: 1", "is not YAML|not a setting"),
        ("[" * 5_000, "is not YAML"),
        ("#" * (FILE_BYTES_MAX + 1), "is larger than"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(Invalid, match=message) as refusal:
        load_file(tmp_path, text)

    assert "forebay.yaml" in str(refusal.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="cannot read settings file .*absent.yaml: No such file"):
        Settings.load(str(tmp_path / "absent.yaml"))


def test_every_number_carries_its_unit_and_every_setting_its_meaning() -> None:
    for setting in all_settings():
        assert setting.meaning.endswith("."), setting.path
        assert setting.unit or setting.type is not int, setting.path


def test_the_settings_page_is_up_to_date() -> None:
    page = tool("settings_docs").page()

    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == page, "run tools/settings_docs.py"
    for setting in settings_of(WalSettings):
        assert setting.environment_name in page
