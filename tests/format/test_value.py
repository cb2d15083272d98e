"""Stored metadata values: they check themselves, and unknown fields outlive an older writer."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.metadata.value import Unknown, decode_value, encode_value


class _Colour(msgspec.Struct, frozen=True):
    name: str
    shade: int = 0


class _LaterColour(msgspec.Struct, frozen=True):
    name: str
    shade: int = 0
    gloss: float = 0.0
    layers: tuple[str, ...] = ()


def _envelope(inner: bytes, version: int = 1, min_reader: int = 1) -> bytes:
    crc = zlib.crc32(inner, zlib.crc32(b"%d,%d," % (version, min_reader)))
    return b'{"version":%d,"min_reader":%d,"crc":%d,"data":%b}' % (version, min_reader, crc, inner)


def test_value_is_exactly_these_bytes() -> None:
    assert encode_value(_Colour("red", 5)) == _envelope(b'{"name":"red","shade":5}')


@given(st.text(), st.integers(-(2**63), 2**64 - 1))
def test_value_comes_back_as_it_was(name: str, shade: int) -> None:
    colour = _Colour(name, shade)

    assert decode_value(encode_value(colour), _Colour) == (colour, Unknown())


def test_unknown_fields_are_kept_when_an_older_version_writes_back() -> None:
    later = _LaterColour("red", 5, 0.5, ("base", "coat"))
    stored = encode_value(later, version=2, min_reader=1)

    colour, unknown = decode_value(stored, _Colour)
    again = encode_value(msgspec.structs.replace(colour, shade=6), unknown=unknown)

    assert unknown == Unknown(2, 1, {"gloss": 0.5, "layers": ["base", "coat"]})
    assert decode_value(again, _LaterColour) == (msgspec.structs.replace(later, shade=6), Unknown(2, 1, {}))


def test_rewriting_without_unknown_fields_gives_the_same_bytes() -> None:
    stored = encode_value(_Colour("red", 5))
    colour, unknown = decode_value(stored, _Colour)

    assert encode_value(colour, unknown=unknown) == stored


@pytest.mark.parametrize(
    "stored",
    [
        _envelope(b'{"name":"red"}', version=2, min_reader=2),
        b'{"version":3,"min_reader":3,"crc":"blake","data":{}}',
        b'{"min_reader":3,"body":{}}',
    ],
)
def test_value_for_newer_readers_only_is_unsupported_and_not_corrupt(stored: bytes) -> None:
    with pytest.raises(UnsupportedFormat, match="upgrade"):
        decode_value(stored, _Colour)


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"null",
        b"{}",
        b"\xff",
        b'{"version":1,"min_reader":1,"crc":0,"data":{"name":"red"}}',
        _envelope(b'{"name":"red"}').replace(b"red", b"rad"),
        _envelope(b'{"name":5}'),
        _envelope(b'{"shade":5}'),
        _envelope(b'{"name":"\xff"}'),
        _envelope(b"[]"),
        _envelope(b'{"name":"red"}') + b"}",
    ],
)
def test_value_that_does_not_check_is_corrupt(stored: bytes) -> None:
    with pytest.raises(Corrupt, match="_Colour"):
        decode_value(stored, _Colour)


_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=5).filter(lambda name: name not in {"name", "shade"}), _JSON, max_size=4))
def test_any_unknown_fields_come_back_as_they_were(fields: dict[str, Any]) -> None:
    stored = encode_value(_Colour("red"), unknown=Unknown(fields=fields))

    assert decode_value(stored, _Colour) == (_Colour("red"), Unknown(1, 1, fields))
