"""Topic names, definitions and shard names: what is accepted, and what the refusals say."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Invalid, Unsupported
from forebay.topics import Cleanup, Durability, Engine, OnFull, TopicName, TopicSpec, parse_compression, shard_id

TOPIC_ID = "0123456789abcdef" * 2
NAME = TopicName("shop", "orders")
PART = st.text("abcXYZ019._-", min_size=1, max_size=100).filter(lambda part: part not in (".", ".."))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("orders", "default/orders"),
        ("/orders", "default/orders"),
        ("shop/orders", "shop/orders"),
        ("/shop/orders", "shop/orders"),
        ("A.b_c-9/...", "A.b_c-9/..."),
        ("x" * 100 + "/" + "y" * 100, "x" * 100 + "/" + "y" * 100),
    ],
)
def test_a_name_is_normalised(text: str, expected: str) -> None:
    assert str(TopicName.parse(text)) == expected


@given(PART, PART)
def test_the_shown_name_parses_to_itself(namespace: str, topic: str) -> None:
    name = TopicName(namespace, topic)

    assert TopicName.parse(str(name)) == name == TopicName.parse(f"/{name}")


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ("", "an empty part"),
        ("/", "an empty part"),
        ("/a//b", "an empty part"),
        ("//a", "an empty part"),
        ("a/", "an empty part"),
        ("a/b/c", "3 parts"),
        (".", 'may not be "."'),
        ("a/..", 'may not be ".."'),
        ("../a", 'may not be ".."'),
        ("a\0b", r"'\x00' (U+0000)"),
        ("a\n", r"'\n' (U+000A)"),
        ("\u0430", r"'\u0430' (U+0430)"),
        ("orders\uff0ex", "U+FF0E"),
        ("a b", "U+0020"),
        ("a%2e", "U+0025"),
        ("x" * 101, "101 characters"),
        ("x" * 300, "300 characters"),
        ("x/" + "y" * 5000, "5000 characters"),
    ],
)
def test_a_bad_name_is_refused_with_its_flaw_and_the_rule(text: str, flaw: str) -> None:
    with pytest.raises(Invalid) as refusal:
        TopicName.parse(text)

    message = str(refusal.value)
    assert flaw in message
    assert 'write "topic" or "namespace/topic"' in message
    assert message.isascii()
    assert len(message) < 400


@given(st.text())
def test_any_text_is_a_name_or_is_refused(text: str) -> None:
    try:
        name = TopicName.parse(text)
    except Invalid:
        return

    assert str(name).count("/") == 1


def test_a_name_made_from_parts_is_checked_too() -> None:
    with pytest.raises(Invalid, match="U\\+002F"):
        TopicName("a/b", "c")
    with pytest.raises(Invalid, match="str or a TopicName, not bytes"):
        TopicName.parse(b"orders")  # type: ignore[arg-type]


def test_a_definition_has_defaults_and_survives_storing() -> None:
    spec = TopicSpec.create(NAME, topic_id=TOPIC_ID, created_at=17)

    assert (spec.partitions, spec.generation, spec.created_at) == (1, 1, 17)
    assert (spec.engine, spec.durability, spec.compression) == (Engine.SEGMENT, Durability.DISK, "none")
    assert spec.name == NAME
    assert msgspec.json.decode(msgspec.json.encode(spec), type=TopicSpec) == spec


@pytest.mark.parametrize(
    ("engine", "durability", "expected"),
    [
        (None, None, (Engine.SEGMENT, Durability.DISK)),
        (None, "fsync", (Engine.SEGMENT, Durability.FSYNC)),
        (None, "memory", (Engine.SEGMENT, Durability.MEMORY)),
        ("segment", "memory", (Engine.SEGMENT, Durability.MEMORY)),
        (None, "ephemeral", (Engine.MEMORY, Durability.EPHEMERAL)),
        ("memory", None, (Engine.MEMORY, Durability.EPHEMERAL)),
        ("memory", "ephemeral", (Engine.MEMORY, Durability.EPHEMERAL)),
        ("rocksdb", None, (Engine.ROCKSDB, Durability.DISK)),
        ("rocksdb", "fsync", (Engine.ROCKSDB, Durability.FSYNC)),
    ],
)
def test_engine_and_durability_follow_from_each_other(
    engine: str | None, durability: str | None, expected: tuple[Engine, Durability]
) -> None:
    spec = TopicSpec.create(NAME, topic_id=TOPIC_ID, created_at=0, engine=engine, durability=durability)

    assert (spec.engine, spec.durability) == expected


@pytest.mark.parametrize(
    ("engine", "durability", "message"),
    [
        ("segment", "ephemeral", 'use engine "memory"'),
        ("memory", "disk", 'needs engine "segment"'),
        ("memory", "memory", 'needs engine "segment"'),
        ("rocksdb", "ephemeral", 'use engine "memory"'),
        ("rocksdb", "memory", 'use durability "disk" or "fsync", or engine "segment"'),
        ("paper", None, "engine is 'paper'; use one of segment, memory, rocksdb"),
        (None, "forever", "durability is 'forever'; use one of ephemeral, memory, disk, fsync"),
    ],
)
def test_contradictions_are_refused(engine: str | None, durability: str | None, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        TopicSpec.create(NAME, topic_id=TOPIC_ID, created_at=0, engine=engine, durability=durability)


def test_what_is_not_offered_yet_says_so() -> None:
    with pytest.raises(Unsupported, match="replicated.*not offered yet; use one of"):
        Durability.parse("replicated")


def test_limits_have_defaults_are_checked_and_survive_storing() -> None:
    spec = TopicSpec.create(NAME, topic_id=TOPIC_ID, created_at=0)
    assert (spec.cap_records, spec.cap_bytes, spec.ttl_ms) == (None, None, None)
    assert (spec.on_full, spec.cleanup, spec.compact_lag_ms) == (OnFull.DISCARD_OLD, Cleanup.DELETE, 86_400_000)

    chosen = TopicSpec.create(
        NAME,
        topic_id=TOPIC_ID,
        created_at=0,
        cap_records=7,
        cap_bytes=4096,
        ttl_ms=60_000,
        on_full="reject_new",
        cleanup="compact",
        compact_lag_ms=0,
    )
    assert (chosen.cap_records, chosen.cap_bytes, chosen.ttl_ms, chosen.compact_lag_ms) == (7, 4096, 60_000, 0)
    assert (chosen.on_full, chosen.cleanup) == (OnFull.REJECT_NEW, Cleanup.COMPACT)
    assert msgspec.json.decode(msgspec.json.encode(chosen), type=TopicSpec) == chosen


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cap_records": 0}, "cap_records is 0; allowed: 1 to"),
        ({"cap_bytes": -1}, "cap_bytes is -1"),
        ({"ttl_ms": True}, "ttl_ms is True"),
        ({"ttl_ms": 2**63}, "ttl_ms is 9223372036854775808"),
        ({"cap_bytes": "1 GB"}, "cap_bytes is '1 GB'"),
        ({"compact_lag_ms": -1}, "compact_lag_ms is -1; allowed: 0 to"),
        ({"on_full": "explode"}, "on_full is 'explode'; use one of discard_old, reject_new"),
        ({"on_full": "reject_new", "ttl_ms": 5}, "needs a cap to be full at"),
        ({"cleanup": "shred"}, "cleanup is 'shred'; use one of delete, compact"),
        ({"cleanup": "compact", "ttl_ms": 86_400_000}, "ttl_ms 86400000 ends every record before compact_lag_ms"),
        ({"cleanup": "compact", "ttl_ms": 5, "compact_lag_ms": 5}, "choose a smaller lag, or a longer time to live"),
    ],
)
def test_impossible_limits_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        TopicSpec.create(NAME, topic_id=TOPIC_ID, created_at=0, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("partitions", [0, -1, 1025, 10**30])
def test_the_number_of_partitions_is_bounded(partitions: int) -> None:
    with pytest.raises(Invalid, match="for shop/orders; allowed: 1 to 1024"):
        TopicSpec.create(NAME, topic_id=TOPIC_ID, created_at=0, partitions=partitions)


@pytest.mark.parametrize("topic_id", ["", "0" * 31, "0" * 33, "G" * 32, "A" * 32, "0" * 31 + "\n"])
def test_a_topic_id_is_32_hexadecimal_digits(topic_id: str) -> None:
    with pytest.raises(Invalid, match="32 hexadecimal digits"):
        TopicSpec.create(NAME, topic_id=topic_id, created_at=0)


@pytest.mark.parametrize(("text", "level"), [("none", None), ("zstd", 1), ("zstd:1", 1), ("zstd:19", 19)])
def test_compression_is_parsed(text: str, level: int | None) -> None:
    assert parse_compression(text) == level


@pytest.mark.parametrize("text", ["", "zstd:", "zstd:0", "zstd:20", "zstd:-1", "zstd:1.0", "zstd:٣", "ZSTD", "none:1"])
def test_bad_compression_is_refused_with_the_rule(text: str) -> None:
    with pytest.raises(Invalid, match='"zstd:<level>" with a level of 1 to 19'):
        parse_compression(text)


def test_a_codec_that_is_not_offered_says_so() -> None:
    with pytest.raises(Unsupported, match='"lz4" is not offered; use "none"'):
        parse_compression("lz4")


def test_a_shard_is_named_by_topic_id_and_partition() -> None:
    assert shard_id(TOPIC_ID, 7) == f"{TOPIC_ID}_7"
