"""A client of a broker with TLS: whom it trusts, and what becomes of it when the certificate changes."""

from __future__ import annotations

import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
import trustme

import forebay
from tests.broker.test_tls import Files, look, serving

REFUSED_SECONDS = 2.0


@pytest.fixture
def files(tmp_path: Path) -> Files:
    made = Files(tmp_path / "server.pem", tmp_path / "server.key", trustme.CA())
    made.issue()
    return made


def trusted(files: Files, path: Path) -> Path:
    """The certificate of the authority, in a file."""
    files.authority.cert_pem.write_to_path(str(path))
    return path


@pytest.mark.parametrize(("url", "loads"), [("http://127.0.0.1:1", 0), ("HTTPS://127.0.0.1:1", 1)])
def test_authorities_are_loaded_only_where_certificates_are_checked(
    url: str, loads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []
    whole = ssl.SSLContext.load_verify_locations

    def noted(context: ssl.SSLContext, *given: Any, **named: Any) -> None:
        loaded.append(given or named)
        whole(context, *given, **named)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", noted)

    forebay.connect(url).close()

    assert len(loaded) == loads


@pytest.mark.slow  # a certificate may be mended meanwhile, so a call is repeated until its time is up
def test_a_client_trusts_the_authority_that_it_is_given_and_no_other(tmp_path: Path, files: Files) -> None:
    with serving(tmp_path, files) as broker:
        with forebay.connect(broker.url, verify=trusted(files, tmp_path / "ca.pem")) as log:
            assert log.create_topic("shop/orders").append(b"a") == 0
        stranger = Files(files.cert, files.key, trustme.CA())
        for verify in (trusted(stranger, tmp_path / "other.pem"), True):
            with (
                forebay.connect(broker.url, verify=verify, timeout_s=REFUSED_SECONDS) as log,
                pytest.raises(forebay.Unavailable, match="CERTIFICATE_VERIFY_FAILED"),
            ):
                log.topics()


@pytest.mark.slow  # as above
def test_a_certificate_for_another_name_is_refused(tmp_path: Path, files: Files) -> None:
    files.write(files.authority.issue_cert("elsewhere.example"))
    with (
        serving(tmp_path, files) as broker,
        forebay.connect(broker.url, verify=trusted(files, tmp_path / "ca.pem"), timeout_s=REFUSED_SECONDS) as log,
        pytest.raises(forebay.Unavailable, match="IP address mismatch"),
    ):
        log.topics()


@pytest.mark.slow
def test_a_running_client_goes_on_when_the_certificate_changes(tmp_path: Path, files: Files) -> None:
    trust = trusted(files, tmp_path / "ca.pem")
    with serving(tmp_path, files) as broker, forebay.connect(broker.url, verify=trust) as log:
        topic = log.create_topic("shop/orders")
        with topic.follow(timeout=60) as following:
            files.issue()
            look(broker)
            # More at the same time than there are connections: new ones see the new certificate.
            threads = [threading.Thread(target=topic.append, args=(b"%d" % number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

            assert sorted(next(following).value or b"" for _ in range(4)) == [b"0", b"1", b"2", b"3"]
