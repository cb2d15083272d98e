"""Rules of routers: which records pass, what becomes of them, and where they go."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from forebay.errors import Invalid
from forebay.format.metadata.value import decode_value, encode_value
from forebay.partitioning import partition_of_key
from forebay.records import Record
from forebay.routers import HeaderMatch, RouterRule, RouterSource, RouterSpec
from forebay.routers.rules import check_no_cycle, routed
from forebay.routing import check_router_name, check_rule
from forebay.topics import TopicName


def _record(
    offset: int = 0,
    key: bytes | None = None,
    tag: str | None = None,
    headers: tuple[tuple[str, bytes | None], ...] = (),
    partition: int = 0,
) -> Record:
    return Record(partition, offset, 1_000 + offset, key, b"value", tag, headers)


_FULL = _record(key=b"eu-42", tag="paid", headers=(("kind", b"order"), ("kind", b"late"), ("note", None)))


@pytest.mark.parametrize(
    ("rule", "takes"),
    [
        (RouterRule(), True),
        (RouterRule(tags=("paid",)), True),
        (RouterRule(tags=("open", "paid")), True),
        (RouterRule(tags=("open",)), False),
        (RouterRule(key_prefix=b"eu-"), True),
        (RouterRule(key_prefix=b"us-"), False),
        (RouterRule(headers=(HeaderMatch("kind"),)), True),
        (RouterRule(headers=(HeaderMatch("kind", b"late"),)), True),
        (RouterRule(headers=(HeaderMatch("kind", b"lat"),)), False),
        (RouterRule(headers=(HeaderMatch("note"),)), True),
        (RouterRule(headers=(HeaderMatch("kind"), HeaderMatch("absent"))), False),
        (RouterRule(tags=("paid",), key_prefix=b"us-"), False),
    ],
    ids=range(12),
)
def test_a_record_passes_if_it_meets_every_condition(rule: RouterRule, *, takes: bool) -> None:
    assert rule.takes(_FULL) is takes


def test_a_record_without_key_tag_and_headers_meets_no_condition() -> None:
    bare = _record()

    assert RouterRule().takes(bare)
    for rule in (RouterRule(tags=("",)), RouterRule(key_prefix=b"a"), RouterRule(headers=(HeaderMatch("kind"),))):
        assert not rule.takes(bare)


@pytest.mark.parametrize(
    ("key", "expected"),
    [("keep", b"eu-42"), ("none", None), ("tag", b"paid"), ("header:kind", b"order"), ("header:absent", None)],
)
def test_the_key_is_kept_or_taken_from_elsewhere(key: str, expected: bytes | None) -> None:
    assert RouterRule(key=key).key_of(_FULL) == expected


def test_headers_are_removed_and_replaced_and_the_rest_keeps_its_order() -> None:
    rule = RouterRule(set_headers=(("kind", b"new"), ("by", b"router")), remove_headers=("note", "absent"))

    assert rule.headers_of(_FULL) == (("kind", b"new"), ("by", b"router"))
    assert RouterRule(remove_headers=("kind",)).headers_of(_FULL) == (("note", None),)
    assert RouterRule().headers_of(_FULL) is _FULL.headers


def test_records_go_by_the_hash_of_their_new_key_and_without_one_by_their_partition() -> None:
    records = [_record(5, tag="a", partition=7), _record(6, key=b"k", partition=7), _record(9, partition=7)]

    by_tag = routed(RouterRule(key="tag"), records, 4, {}).parts
    plain = routed(RouterRule(), records, 4, {}).parts

    assert {place: part.last for place, (part,) in by_tag.items()} == {partition_of_key(b"a", 4): 5, 3: 9}
    assert plain[3][0].timestamps == [1_005, 1_009]
    assert plain[partition_of_key(b"k", 4)][0].keys == [b"k"]


@given(
    some.lists(some.tuples(some.integers(1, 3), some.sampled_from([None, b"a", b"b", b"c"]), some.booleans())),
    some.integers(1, 5),
    some.dictionaries(some.integers(0, 4), some.integers(-1, 40)),
    some.sampled_from([1, 50, 10_000]),
)
def test_each_record_is_routed_once_left_out_or_has_arrived(
    steps: list[tuple[int, bytes | None, bool]], partitions: int, arrived: dict[int, int], bytes_max: int
) -> None:
    offset, records = -1, []
    for step, key, is_tagged in steps:
        offset += step
        records.append(_record(offset, key, "t" if is_tagged else None, partition=2))

    parts, left_out, too_large = routed(RouterRule(tags=("t",)), records, partitions, arrived, bytes_max=bytes_max)

    def place_of(record: Record) -> int:
        return 2 % partitions if record.key is None else partition_of_key(record.key, partitions)

    expected: dict[int, list[int]] = {}
    for record in records:
        if record.tag == "t" and record.offset > arrived.get(place_of(record), -1):
            expected.setdefault(place_of(record), []).append(record.timestamp)
    found = {place: [at for part in appends for at in part.timestamps] for place, appends in parts.items()}
    assert found == expected
    assert left_out == sum(record.tag is None for record in records)
    assert too_large == []
    every = [part for appends in parts.values() for part in appends]
    assert all(part.last == part.timestamps[-1] - 1_000 for part in every)
    assert all(part.size <= bytes_max or len(part.values) == 1 for part in every)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ü", "x" * 101])
def test_a_name_that_cannot_be_stored_is_refused(name: str) -> None:
    with pytest.raises(Invalid, match="router's name"):
        check_router_name(name)


@pytest.mark.parametrize("key", ["", "header:", "Keep", "value"])
def test_a_rule_with_an_unknown_key_is_refused_and_says_what_is_known(key: str) -> None:
    with pytest.raises(Invalid, match="keep, none, tag or header:NAME"):
        check_rule(RouterRule(key=key))


def test_a_rule_has_limits() -> None:
    for rule in (
        RouterRule(tags=tuple(map(str, range(101)))),
        RouterRule(tags=("x" * 1025,)),
        RouterRule(key_prefix=b"x" * 70_000),
    ):
        with pytest.raises(Invalid, match="allowed"):
            check_rule(rule)
    check_rule(RouterRule(tags=tuple(map(str, range(100))), key="header:x"))


def _router(name: str, source: str, destination: str) -> RouterSpec:
    return RouterSpec(
        name=name,
        router_id="0" * 16,
        sources=(RouterSource(topic=source, topic_id="s"),),
        destination=destination,
        destination_id="d",
        rules=(RouterRule(),),
        created_at=0,
    )


def test_a_circle_is_refused_with_its_way() -> None:
    known = [_router("one", "n/a", "n/b"), _router("two", "n/b", "n/c"), _router("three", "n/b", "n/d")]

    check_no_cycle(known, [TopicName.parse("n/a")], TopicName.parse("n/c"))
    with pytest.raises(Invalid, match=r"circle: n/c → n/a → n/b → n/c"):
        check_no_cycle(known, [TopicName.parse("n/c")], TopicName.parse("n/a"))
    with pytest.raises(Invalid, match=r"circle: n/a → n/a;"):
        check_no_cycle([], [TopicName.parse("n/x"), TopicName.parse("n/a")], TopicName.parse("n/a"))


def test_a_stored_router_is_read_as_it_was_written_and_later_fields_stay() -> None:
    rule = RouterRule(key_prefix=b"\xff\x00", headers=(HeaderMatch("h", b"\x01"), HeaderMatch("n")))
    router = msgspec.structs.replace(_router("one", "n/a", "n/b"), rules=(RouterRule(), rule), rules_before=10)

    found, _ = decode_value(encode_value(router), RouterSpec)

    assert found == router
    assert found.rule == rule
    assert found.version == 12
    assert [found.rule_of(version) for version in (10, 11, 12, 13)] == [None, RouterRule(), rule, None]
    later = RouterRule(tags=("t",))
    assert (found.altered(later, 12).rules, found.altered(later, 12).version) == ((rule, later), 13)
    assert found.altered(later, 11).rules == (RouterRule(), rule, later)
