"""The store in etcd behind a login, and behind certificates that both sides check."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

import forebay
from forebay.clock import SystemClock
from forebay.errors import Invalid, Unavailable
from forebay.metadata import Put
from forebay.metadata.etcd import EtcdMetadata
from forebay.settings import MetadataSettings
from forebay.spark.place.location import Location
from forebay.spark.place.opening import opened as spark_opened
from forebay.testing.contracts.metadata.calls import drain, put
from tests.cli.rig import Shell
from tests.support.etcd import Cluster, running, text

PASSWORD = "correct horse"


def opened(cluster: Cluster, *, timeout_ms: int = 2_000, **settings: str) -> EtcdMetadata:
    made = MetadataSettings(
        backend="etcd",
        endpoints=cluster.endpoints,
        request_timeout_ms=timeout_ms,
        **settings,  # type: ignore[arg-type]
    )
    return EtcdMetadata.open(made, clock=SystemClock())


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One member that asks for a login; the user `forebay` may use `/forebay/…`."""
    with running(tmp_path_factory.mktemp("guarded"), 1, options=["--bcrypt-cost", "4"]) as cluster:
        for user, password in (("root", "r"), ("forebay", PASSWORD)):
            cluster.call("auth/user/add", {"name": user, "password": password})
            cluster.call("auth/role/add", {"name": user})
            cluster.call("auth/user/grant", {"user": user, "role": user})
        allowed = {"permType": "READWRITE", "key": text("/forebay/"), "range_end": text("/forebay0")}
        cluster.call("auth/role/grant", {"name": "forebay", "perm": allowed})
        cluster.call("auth/enable")
        yield cluster


def test_a_login_lasts_and_is_repeated_when_its_token_is_forgotten(guarded: Cluster) -> None:
    with closing(opened(guarded, user="forebay", password=PASSWORD)) as store:
        session = store.session(30.0)
        with store.watch("/forebay/a") as watch:
            assert watch.poll(0.0) == []
            put(store, "/forebay/a1")
            drain(watch, 1)

            # A member that starts again has forgotten the tokens it gave.
            guarded.members[0].kill()
            guarded.start_all()

            put(store, "/forebay/a2")
            assert [change.key for change in drain(watch, 1)] == ["/forebay/a2"]
        assert store.session_alive(session.id)
        assert store.transaction([], [Put("/forebay/mine", b"", session=session.id)]).succeeded


def test_what_the_user_may_not_do_is_refused_with_the_way_out(guarded: Cluster) -> None:
    with closing(opened(guarded, user="forebay", password=PASSWORD)) as store:
        for call in (
            lambda: store.get("/other"),
            lambda: store.range(""),
            lambda: put(store, "/other"),
            lambda: store.watch("/other").poll(0.0),
        ):
            with pytest.raises(Invalid, match="does not permit this .*grant the user of metadata.user"):
                call()


def test_commands_that_look_need_no_more_than_the_prefix(guarded: Cluster, tmp_path: Path) -> None:
    """Another installation in the same etcd is neither needed nor shown."""
    with closing(opened(guarded, user="root", password="r")) as store:
        put(store, "/another/topics/default/t")
    reach = {"backend": "etcd", "endpoints": ",".join(guarded.endpoints), "user": "forebay", "password": PASSWORD}
    with forebay.open(str(tmp_path / "data"), {"metadata": reach}) as log:
        log.create_topic("shop/orders").append(b"1")
    words = [word for name, value in reach.items() for word in ("--set", f"metadata.{name}={value}")]
    shell = Shell(tmp_path / "data")

    dumped = [item["key"] for item in shell.ok("dump", "--json", *words).items]
    topics = [item["key"] for item in shell.ok("dump", "--key", "/forebay/topics/", "--json", *words).items]

    assert topics == ["/forebay/topics/shop/orders"] and topics[0] in dumped
    assert all(key.startswith("/forebay/") for key in dumped)
    for command in (["topic", "list"], ["topic", "show", "shop/orders"], ["du"], ["verify"], ["group", "list"]):
        shell.ok(*command, *words)


def test_a_wrong_password_is_refused_and_not_repeated_to_any_caller(guarded: Cluster) -> None:
    with pytest.raises(Invalid, match="etcd refuses user 'forebay' .*check metadata.user") as refusal:
        opened(guarded, user="forebay", password="wrong horse")

    assert "horse" not in str(refusal.value)
    with pytest.raises(Invalid, match="wants to know who asks .*set metadata.user and metadata.password"):
        opened(guarded)


def test_certificates_are_checked_on_both_sides(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("forebay@example.org")
    for name, certificate in (("server", server), ("client", client)):
        certificate.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        certificate.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    stranger.cert_pem.write_to_path(tmp_path / "stranger.pem")
    options = ["--client-cert-auth", "--trusted-ca-file", str(tmp_path / "ca.pem")]
    options += ["--cert-file", str(tmp_path / "server.pem"), "--key-file", str(tmp_path / "server.key")]
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    context.load_cert_chain(tmp_path / "client.pem", tmp_path / "client.key")
    own: dict[str, Any] = {"tls_cert": str(tmp_path / "client.pem"), "tls_key": str(tmp_path / "client.key")}
    plain = httpx.Client(verify=context, trust_env=False, timeout=5.0)

    with running(tmp_path, 1, options=options, scheme="https", tls=plain) as cluster:
        with closing(opened(cluster, tls_ca=str(tmp_path / "ca.pem"), **own)) as store, store.watch("a") as watch:
            assert watch.poll(0.0) == []
            put(store, "a")
            assert [change.key for change in drain(watch, 1)] == ["a"]
        _check_spark_reaches(cluster, "a", tls_ca=str(tmp_path / "ca.pem"), **own)

        with pytest.raises(Unavailable, match="certificate verify failed"):
            opened(cluster, timeout_ms=300, tls_ca=str(tmp_path / "stranger.pem"), **own)
        with pytest.raises(Unavailable, match="certificate|CERTIFICATE|disconnected|reset"):
            opened(cluster, timeout_ms=300, tls_ca=str(tmp_path / "ca.pem"))


def _check_spark_reaches(cluster: Cluster, key: str, **files: str) -> None:
    """The option `metadata` of the Spark source says that members are spoken to over TLS, and only then they are."""
    members = ",".join(endpoint.removeprefix("https://") for endpoint in cluster.endpoints)
    options = {"store": "file:///nowhere", **{f"metadata.{name}": path for name, path in files.items()}}
    with spark_opened(Location.parse({**options, "metadata": f"etcds://{members}"}, {})) as found:
        assert found.metadata.get(key) is not None
    with (
        spark_opened(Location.parse({**options, "metadata": f"etcd://{members}"}, {})) as found,
        pytest.raises(Invalid, match=f"http://{members} is not encrypted"),
    ):
        found.metadata.get(key)


def test_settings_that_would_send_secrets_in_the_clear_or_name_no_file_are_refused(tmp_path: Path) -> None:
    settings = MetadataSettings(backend="etcd", endpoints=("http://a:1",), tls_ca="ca.pem")
    with pytest.raises(Invalid, match="http://a:1 is not encrypted: write https://"):
        EtcdMetadata.open(settings, clock=SystemClock())

    settings = MetadataSettings(backend="etcd", endpoints=("https://a:1",), tls_ca=str(tmp_path / "absent.pem"))
    with pytest.raises(Invalid, match="cannot use the certificates .*absent.pem: No such file"):
        EtcdMetadata.open(settings, clock=SystemClock())
