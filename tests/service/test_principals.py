"""Who may do what: scopes on topics, by whole parts of their names."""

from __future__ import annotations

import pytest

from forebay.errors import Forbidden, Invalid
from forebay.service.principals import AccessScope, Principal, check_may, listed, listed_ranges, may, parse_prefix
from forebay.topics import TopicName

READ, WRITE, DELETE, ADMIN = AccessScope


def principal(*prefixes: str, scopes: tuple[AccessScope, ...] = (READ,)) -> Principal:
    return Principal(name="billing", scopes=frozenset(scopes), prefixes=frozenset(map(parse_prefix, prefixes)))


@pytest.mark.parametrize(
    ("prefix", "topic", "is_covered"),
    [
        ("shop/", "shop/orders", True),
        ("shop/", "shop2/orders", False),
        ("shop/", "sho/p", False),
        ("shop/", "default/shop", False),
        ("/shop/", "shop/orders", True),
        ("shop/orders", "shop/orders", True),
        ("shop/orders", "shop/orders2", False),
        ("shop/orders", "shop/order", False),
        ("shop/orders", "shop2/orders", False),
        ("default/", "orders", True),
        ("*", "shop/orders", True),
    ],
)
def test_a_prefix_covers_whole_parts_of_names(prefix: str, topic: str, is_covered: bool) -> None:  # noqa: FBT001
    name = TopicName.parse(topic)

    assert may(principal(prefix), READ, name) is is_covered
    assert listed(principal(prefix), [name]) == ([name] if is_covered else [])


@pytest.mark.parametrize(
    "text", ["", "/", "shop", "shop//", "shop/a/b", "/shop/a/", "sh op/", "./", "shop/..", "*/", "**"]
)
def test_what_is_no_prefix_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        parse_prefix(text)


def test_a_prefix_that_could_mean_two_things_names_both() -> None:
    with pytest.raises(Invalid, match='write "shop/" for the topics of that namespace, "default/shop" for one topic'):
        parse_prefix("shop")


@pytest.mark.parametrize("scope", AccessScope)
def test_no_scope_includes_another(scope: AccessScope) -> None:
    allowed = principal("shop/", scopes=(scope,))

    assert [other for other in AccessScope if may(allowed, other, TopicName("shop", "orders"))] == [scope]


def test_several_prefixes_and_scopes_hold_together() -> None:
    both = principal("shop/", "bank/accounts", scopes=(READ, WRITE))

    assert may(both, WRITE, TopicName("bank", "accounts"))
    assert not may(both, WRITE, TopicName("bank", "others"))
    assert not may(both, DELETE, TopicName("shop", "orders"))


def test_what_belongs_to_no_topic_takes_every_topic() -> None:
    assert may(principal("*", scopes=(ADMIN,)), ADMIN, None)
    assert not may(principal("shop/", scopes=(ADMIN,)), ADMIN, None)
    assert not may(principal("*", scopes=(READ,)), ADMIN, None)


def test_a_list_holds_what_the_caller_may_know_of_in_its_order() -> None:
    names = [TopicName.parse(text) for text in ("bank/b", "shop/a", "shop2/a", "bank/a", "shop/b")]

    assert [str(name) for name in listed(principal("shop/", "bank/a"), names)] == ["shop/a", "bank/a", "shop/b"]


def test_a_refusal_names_the_caller_the_scope_and_the_topic() -> None:
    check_may(principal("shop/"), READ, TopicName("shop", "orders"))

    with pytest.raises(Forbidden, match="billing has no scope write on topic shop/orders") as refusal:
        check_may(principal("shop/"), WRITE, TopicName("shop", "orders"))
    assert refusal.value.detail == {"topic": "shop/orders", "scope": "write"}
    with pytest.raises(Forbidden, match="no scope admin on the whole broker"):
        check_may(principal("shop/", scopes=(ADMIN,)), ADMIN, None)


def test_a_scope_is_parsed_by_its_name() -> None:
    assert [AccessScope.parse(text) for text in ("read", "write", "delete", "admin")] == list(AccessScope)
    with pytest.raises(Invalid, match="scope is 'root'; use one of read, write, delete, admin"):
        AccessScope.parse("root")


@pytest.mark.parametrize(
    ("prefixes", "asked", "ranges"),
    [
        (["*", "shop/"], "sh", ["sh*"]),
        (["shop/", "audit/"], "", ["audit/*", "shop/*"]),
        (["shop/", "shop/orders"], "", ["shop/*"]),
        (["shop/", "shop2/"], "shop/o", ["shop/o*"]),
        (["shop/orders", "shop/order"], "shop/ord", ["shop/order", "shop/orders"]),
        (["shop/orders"], "shop/orders2", []),
        (["shop/"], "other", []),
        ([], "", []),
    ],
)
def test_the_topics_of_a_caller_lie_in_a_few_ranges(prefixes: list[str], asked: str, ranges: list[str]) -> None:
    found = listed_ranges(principal(*prefixes), asked)

    assert [f"{each.prefix}{'' if each.is_one else '*'}" for each in found] == ranges
