"""What a store answers, and what we make of it: named errors, repetition within limits, no secrets in any of it."""

from __future__ import annotations

import os
import pickle
import re
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.blobs import BlobChanged, BlobMissing, BlobStore, Denied, open_store
from forebay.blobs.objects.processes import LIBRARY
from forebay.disk import SystemDisk
from forebay.errors import Closed, ForebayError, Indeterminate, Invalid, Unavailable, Unsupported
from forebay.settings import KIB, MIB, Settings, StoreSettings
from forebay.testing.simulated.clock import ManualClock
from tests.blobs.scripted import DATE, DROPPED, Answer, Request, Respond, answering, careless, found, in_turn
from tests.support.ports import free_ports
from tests.support.servers import SECRET_KEY, s3_settings

pytestmark = pytest.mark.slow

CREATED = Answer(200, headers={"ETag": '"e"'})
GONE = Answer(404)
TAKEN = Answer(412)


def s3(endpoint: str, **changes: object) -> BlobStore:
    changes.setdefault("request_timeout_ms", 2_000)
    return open_store(s3_settings(endpoint, **changes), disk=SystemDisk(), clock=ManualClock())  # type: ignore[arg-type]


def put(respond: Respond, **changes: object) -> tuple[object, int]:
    """What a create comes to, and how many creates were sent."""
    with answering(respond) as (endpoint, seen):
        try:
            outcome: object = s3(endpoint, **changes).put_if_absent("k", b"data")
        except ForebayError as error:
            outcome = error
        return outcome, sum(request.method == "PUT" for request in seen)


def test_a_store_that_ignores_if_none_match_is_refused() -> None:
    with answering(careless()) as (endpoint, _):
        store = s3(endpoint)

        with pytest.raises(Unsupported, match="s3://forebay-test/p let the same key be created twice"):
            store.probe()


@pytest.mark.parametrize("doubtful", [DROPPED, Answer(500), Answer(502)])
def test_a_probe_without_an_answer_is_unavailable_as_nothing_rests_on_its_object(doubtful: Answer) -> None:
    reported = "s3://forebay-test/p does not answer, so what it can do is not known yet"
    with answering(in_turn(put=[doubtful])) as (endpoint, _), pytest.raises(Unavailable, match=reported):
        s3(endpoint, retries_max=1).probe()


def test_a_probe_in_haste_does_not_wait_as_long_as_the_settings_would() -> None:
    hour_ms = 3_600_000
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = s3_settings(endpoint, request_timeout_ms=hour_ms, retry_timeout_ms=hour_ms, retries_max=100)
        store = open_store(settings, disk=SystemDisk())

        with pytest.raises(Unavailable, match="does not answer"):
            store.probe(seconds_max=0.2)


@pytest.mark.parametrize("status", [429, 503])
def test_a_throttled_create_is_repeated_within_limits_and_then_unavailable(status: int) -> None:
    outcome, sent = put(in_turn(put=[Answer(status)]), retries_max=3)

    assert type(outcome) is Unavailable
    assert "asking for fewer requests" in str(outcome)
    assert sent == 4


def test_after_the_time_for_retries_a_create_is_not_sent_again_however_few_the_tries() -> None:
    outcome, sent = put(in_turn(put=[Answer(503)]), retries_max=100, retry_timeout_ms=2_000)

    assert type(outcome) is Unavailable
    assert 2 <= sent <= 6, "the pauses between them grow"


def test_a_create_that_gets_through_in_the_end_is_ours() -> None:
    outcome, sent = put(in_turn(put=[Answer(503), DROPPED, Answer(500), CREATED]), retries_max=3)

    assert outcome
    assert not isinstance(outcome, ForebayError)
    assert sent == 4


@pytest.mark.parametrize("doubtful", [DROPPED, Answer(500), Answer(502), Answer(504)])
def test_exists_after_an_answer_that_was_lost_may_be_our_own_work(doubtful: Answer) -> None:
    outcome, sent = put(in_turn(put=[doubtful, TAKEN], head=[found(4)]))

    assert type(outcome) is Indeterminate
    assert "k may or may not be stored" in str(outcome)
    assert sent == 2


@pytest.mark.parametrize("then", [TAKEN, Answer(403), Answer(400)])
def test_a_lost_answer_stays_in_doubt_whatever_is_answered_later(then: Answer) -> None:
    outcome, _ = put(in_turn(put=[DROPPED, then], head=[Answer(500)]))

    assert type(outcome) is Indeterminate


def test_exists_after_a_plain_refusal_is_the_work_of_another() -> None:
    outcome, _ = put(in_turn(put=[Answer(503), TAKEN], head=[found(4)]))

    assert not isinstance(outcome, ForebayError)
    assert not outcome


def test_a_conflict_with_nothing_there_is_asked_again() -> None:
    outcome, sent = put(in_turn(put=[Answer(409), CREATED], head=[GONE]))

    assert outcome
    assert not isinstance(outcome, ForebayError)
    assert sent == 2


def test_a_lasting_conflict_with_nothing_there_is_unavailable() -> None:
    outcome, sent = put(in_turn(put=[Answer(409)], head=[GONE]), retries_max=2)

    assert type(outcome) is Unavailable
    assert sent == 3


@pytest.mark.parametrize("doubtful", [DROPPED, Answer(500)])
def test_a_create_that_is_never_answered_is_indeterminate(doubtful: Answer) -> None:
    outcome, sent = put(in_turn(put=[doubtful]), retries_max=2)

    assert type(outcome) is Indeterminate
    assert sent == 3


def test_a_create_that_times_out_is_indeterminate() -> None:
    def silent(request: object) -> Answer:
        # Longer than the client waits: its own end of the connection closes first.
        os.read(waiting, 1)
        return DROPPED

    waiting, ending = os.pipe()
    try:
        outcome, sent = put(silent, retries_max=0, request_timeout_ms=200), 1
    finally:
        os.close(ending)
        os.close(waiting)

    assert type(outcome[0]) is Indeterminate
    assert sent == 1


def test_a_store_that_cannot_be_reached_is_unavailable_and_nothing_was_done() -> None:
    store = s3(f"http://127.0.0.1:{free_ports(1)[0]}", retries_max=1)

    for call in (
        lambda: store.put_if_absent("k", b"1"),
        lambda: store.upload("k", [b"1"]),
        lambda: store.upload("k", [bytes(MIB)] * 12),
        lambda: store.get_range("k", 0, 1),
        lambda: list(store.read("k", 0, 10)),
        lambda: store.stat("k"),
        lambda: list(store.list()),
        lambda: store.delete("k"),
        store.probe,
        lambda: store.abort_stale_uploads(0),
    ):
        with pytest.raises(Unavailable, match="s3://forebay-test/p"):
            call()


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_credential_says_where_to_look_and_shows_no_secret(status: int) -> None:
    body = f"<Error>{SECRET_KEY}</Error>".encode()
    respond = in_turn(**{method: [Answer(status, body)] for method in ("put", "get", "head", "post", "delete")})
    with answering(respond) as (endpoint, seen):
        store = s3(endpoint)
        for call in (
            lambda: store.put_if_absent("k", b"1"),
            lambda: store.upload("k", [b"1"]),
            lambda: store.get_range("k", 0, 1),
            lambda: store.stat("k"),
            lambda: list(store.list()),
            lambda: store.delete("k"),
        ):
            with pytest.raises(Denied, match="look at store.options") as refusal:
                call()
            shown = "".join(traceback.format_exception(refusal.value))
            assert SECRET_KEY not in shown
    assert sum(request.method == "PUT" for request in seen) == 2


def test_a_password_in_the_address_of_a_service_is_not_shown() -> None:
    store = s3(f"http://user:hush@127.0.0.1:{free_ports(1)[0]}", retries_max=0)

    with pytest.raises(Unavailable, match="http://.hidden.@127") as refusal:
        store.stat("k")
    assert "hush" not in str(refusal.value)


def test_a_bucket_that_does_not_exist_is_said_so() -> None:
    with answering(in_turn(put=[GONE], get=[GONE])) as (endpoint, _):
        store = s3(endpoint)

        with pytest.raises(Unavailable, match="does the bucket exist"):
            store.put_if_absent("k", b"1")
        with pytest.raises(Unavailable, match="does the bucket exist"):
            list(store.list())


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_read_is_repeated_within_limits_and_then_unavailable(status: int) -> None:
    with (
        answering(in_turn(get=[Answer(status)], head=[found(100)])) as (endpoint, seen),
        pytest.raises(Unavailable, match="cannot read k"),
    ):
        s3(endpoint, retries_max=2).get_range("k", 0, 10)

    assert sum(request.method == "GET" for request in seen) == 3


def test_a_read_says_missing_or_changed() -> None:
    with answering(in_turn(get=[GONE, TAKEN])) as (endpoint, seen):
        with pytest.raises(BlobMissing, match="no object k"):
            s3(endpoint).get_range("k", 0, 10)
        with pytest.raises(BlobChanged):
            s3(endpoint).get_range("k", 0, 10, etag="old")

    assert seen[1].headers["if-match"] == '"old"'
    assert seen[1].headers["range"] == "bytes=0-9"


def test_a_store_that_ignores_if_match_is_caught_by_the_etag_of_its_answer() -> None:
    headers = {"ETag": '"new"', "Last-Modified": DATE, "Content-Range": "bytes 0-9/10"}
    with (
        answering(in_turn(get=[Answer(206, bytes(10), headers)])) as (endpoint, _),
        pytest.raises(BlobChanged, match="etag new, expected old"),
    ):
        s3(endpoint).get_range("k", 0, 10, etag="old")


def test_a_reader_is_served_only_so_far_ahead_as_the_settings_allow() -> None:
    chunk, size = 64 * KIB, 64 * 64 * KIB

    def respond(request: Request) -> Answer:
        first, last = re.findall(r"\d+", request.headers["range"])
        headers = {"ETag": '"e"', "Last-Modified": DATE, "Content-Range": f"bytes {first}-{last}/{size}"}
        return Answer(206, bytes(int(last) + 1 - int(first)), headers)

    with answering(respond) as (endpoint, seen):
        store = s3(endpoint, read_ahead_bytes=2 * chunk, parts_in_flight_max=64)
        reader = store.read("k", 0, size, chunk_bytes=chunk, ahead=50)
        assert len(next(reader)) == chunk
        store.close()

    assert len(seen) <= 3


def test_an_answer_that_breaks_off_is_asked_for_again_and_never_taken_for_the_end() -> None:
    headers = {"ETag": '"e"', "Last-Modified": DATE, "Content-Range": "bytes 0-99/1000"}
    broken = Answer(206, bytes(100), headers, cut=40)
    with (
        answering(in_turn(get=[broken], head=[found(1000)])) as (endpoint, seen),
        pytest.raises(Unavailable, match="cannot read k"),
    ):
        s3(endpoint, retries_max=1).get_range("k", 0, 100)

    assert sum(request.method == "GET" for request in seen) > 1


@pytest.mark.parametrize("said", ["0-39/1000", "0-99/1000"])
def test_an_answer_with_less_than_was_asked_for_is_never_taken_for_the_end(said: str) -> None:
    headers = {"ETag": '"e"', "Last-Modified": DATE, "Content-Range": f"bytes {said}"}
    with (
        answering(in_turn(get=[Answer(206, bytes(40), headers)])) as (endpoint, _),
        pytest.raises(Unavailable, match="s3://forebay-test/p .* k.*: try again"),
    ):
        s3(endpoint).get_range("k", 0, 100)


def test_a_completion_that_is_repeated_and_finds_its_upload_gone_was_done() -> None:
    """The first was answered, and the answer lost: the service knows the upload no more."""
    begun = Answer(200, b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
    size = 6 * MIB

    def respond(request: Request) -> Answer:
        if request.method == "PUT":
            return CREATED
        if request.method == "POST" and request.path.endswith("?uploads="):
            return begun
        if request.method == "POST":
            completions.append(request)
            return DROPPED if len(completions) == 1 else GONE
        if request.method == "GET":
            first, last = map(int, re.findall(r"\d+", request.headers["range"]))
            headers = {"ETag": '"e"', "Last-Modified": DATE, "Content-Range": f"bytes {first}-{last}/{size}"}
            return Answer(206, bytes(last + 1 - first), headers)
        return found(size) if request.method == "HEAD" else GONE

    completions: list[Request] = []
    with answering(respond) as (endpoint, _):
        assert s3(endpoint, retries_max=2).upload("k", (bytes(MIB) for _ in range(6))).size == size

    assert len(completions) == 2


def test_an_upload_whose_last_answer_was_lost_is_found_by_looking() -> None:
    def script(looked: Answer, content: bytes) -> Respond:
        headers = {"ETag": '"e"', "Last-Modified": DATE, "Content-Range": "bytes 0-5/6"}
        return in_turn(put=[DROPPED], head=[looked], get=[Answer(206, content, headers)])

    with answering(script(found(6), b"abcdef")) as (endpoint, _):
        assert s3(endpoint, retries_max=0).upload("k", [b"abc", memoryview(b"def")]).size == 6
    for looked, content in ((GONE, b""), (found(5), b"abcde"), (found(6), b"abcdeF")):
        with (
            answering(script(looked, content)) as (endpoint, _),
            pytest.raises(Indeterminate, match="k may or may not be stored"),
        ):
            s3(endpoint, retries_max=0).upload("k", [b"abc", b"def"])


def test_an_upload_that_breaks_before_its_end_is_unavailable() -> None:
    """Nothing can be visible: the request that makes it so was never sent."""
    begun = Answer(200, b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
    with (
        answering(in_turn(post=[begun], put=[DROPPED], delete=[Answer(204)])) as (endpoint, seen),
        pytest.raises(Unavailable, match="cannot upload k"),
    ):
        s3(endpoint, retries_max=0, parts_in_flight_max=1).upload("k", (bytes(MIB) for _ in range(100)))

    assert sum(request.method == "POST" for request in seen) == 1


def test_the_examples_in_the_manual_are_stores(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    examples = [block for block in blocks if re.search(r"^store:", block, re.MULTILINE)]
    environment = {"S3_KEY": "key", "S3_SECRET": "secret", "AZURE_KEY": "a2V5"}

    backends = set()
    for example in examples:
        (tmp_path / "forebay.yaml").write_text(example, encoding="utf-8")
        settings = Settings.load(str(tmp_path / "forebay.yaml"), environment=environment).store
        backends.add(settings.backend)
        if settings.backend == "gcs":
            assert isinstance(settings.options["service_account"], str)
        elif settings.backend != "directory":
            assert settings.root is not None
            assert settings.root in open_store(settings, disk=SystemDisk()).name

    assert backends == {"directory", "s3", "azure", "gcs"}


def test_a_store_shows_no_secret_and_is_not_pickled() -> None:
    store = s3("http://127.0.0.1:1")

    assert repr(store) == "ObjectStore(s3://forebay-test/p)"
    with pytest.raises(Unsupported, match="cannot be pickled: send its settings"):
        pickle.dumps(store)


@pytest.mark.parametrize("options", [{"acess_key_id": "hush"}, {"connect_timeout": "hush"}])
def test_an_option_that_is_none_is_named_without_its_value(options: dict[str, object]) -> None:
    with pytest.raises(Invalid, match="store.options do not describe a store on s3") as refusal:
        s3("http://127.0.0.1:1", options=options)

    if "acess_key_id" in options:
        assert "acess_key_id" in str(refusal.value)
        assert "hush" not in str(refusal.value)


def test_a_prefix_that_is_no_key_is_refused() -> None:
    with pytest.raises(Invalid, match="is no key"):
        open_store(StoreSettings(backend="s3", root="bucket/../x"), disk=SystemDisk())


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("forebay.blobs.objects")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)

    with pytest.raises(Unsupported, match=r'pip install "forebay\[object-store\]"'):
        open_store(StoreSettings(backend="memory"), disk=SystemDisk())


def _in_a_child(call: Callable[[], object]) -> str:
    """The name of what `call` raises in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
            raised = "nothing"
        except BaseException as error:  # noqa: BLE001  # whatever it is, the parent judges
            raised = type(error).__name__
        os.write(writing, raised.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        reported = answer.read().decode()
    os.waitpid(child, 0)
    return reported


def test_a_child_forked_after_first_use_is_refused_instead_of_hanging() -> None:
    store = s3("http://127.0.0.1:1")
    assert LIBRARY.used

    assert _in_a_child(lambda: store.stat("k")) == Closed.__name__
    assert _in_a_child(lambda: s3("http://127.0.0.1:1")) == Closed.__name__
