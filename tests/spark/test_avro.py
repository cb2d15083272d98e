"""Avro values become columns a batch at a time, and each that is none or has no place there keeps its own reason."""

from __future__ import annotations

import io
from collections.abc import Callable
from random import Random  # noqa: TID251  # seeded: the same values again
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from forebay.spark.values import avro
from forebay.spark.values.avro import AvroValues

SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"]},
        {"name": "parts", "type": {"type": "array", "items": "long"}},
    ],
}
KIND = pa.struct([("id", pa.int32()), ("name", pa.string()), ("parts", pa.list_(pa.int16()))])
"""Narrower than the schema: some records have no place."""


class _Arrays:
    """`pyarrow` as the module sees it, which counts the arrays that are made of records."""

    def __init__(self) -> None:
        self.made = 0

    def array(self, values: Any, kind: pa.DataType) -> Any:
        self.made += kind == KIND
        return pa.array(values, kind)

    def __getattr__(self, name: str) -> Any:
        return getattr(pa, name)


def _value(number: int, name: str | None = "a", parts: tuple[int, ...] = ()) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, SCHEMA, {"id": number, "name": name, "parts": list(parts)})
    return stream.getvalue()


BAD: dict[str, Callable[[int], bytes]] = {
    "no place": lambda number: _value(2**40 + number),
    "no place below": lambda number: _value(number, parts=(1, 2**20)),
    "cut": lambda number: _value(number, "longer")[:-3],
    "left over": lambda number: _value(number) + b"x",
    "empty": lambda _: b"",
    "no text": lambda _: b"\x02\x02\x04\xff\xfe\x00",
}


def _one_by_one(values: list[bytes | None]) -> list[tuple[Any, str | None]]:
    """What each value gives alone."""
    decoder = AvroValues(SCHEMA, KIND)
    found = [decoder.decode(pa.array([value], pa.binary())) for value in values]
    return [(records.to_pylist()[0], errors.to_pylist()[0]) for records, errors in found]


def _together(values: list[bytes | None]) -> list[tuple[Any, str | None]]:
    records, errors = AvroValues(SCHEMA, KIND).decode(pa.array(values, pa.binary()))
    assert records.type == KIND
    records.validate(full=True)
    return list(zip(records.to_pylist(), errors.to_pylist(), strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_gives_what_its_values_give_alone(seed: int) -> None:
    chance = Random(seed)
    values: list[bytes | None] = [_value(number, parts=(number,)) for number in range(chance.randrange(40))]
    for kind in chance.choices([*BAD, "null"], k=seed % 8):
        place = chance.randrange(len(values) + 1)
        values.insert(place, None if kind == "null" else BAD[kind](place))

    found = _together(values)

    assert found == _one_by_one(values)
    for value, (record, error) in zip(values, found, strict=True):
        assert [value, record, error].count(None) == (3 if value is None else 1)


@pytest.mark.parametrize("kind", BAD)
def test_a_batch_of_nothing_but_bad_values_has_a_reason_for_each(kind: str) -> None:
    values: list[bytes | None] = [BAD[kind](number) for number in range(5)]

    found = _together(values)

    assert found == _one_by_one(values)
    assert all(record is None and error for record, error in found)


def test_good_records_make_one_array_however_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = _Arrays()
    monkeypatch.setattr(avro, "pa", arrays)
    values: list[bytes | None] = [_value(number) for number in range(1000)]
    values += [None, BAD["cut"](1)]

    assert sum(error is not None for _, error in _together(values)) == 1

    assert arrays.made == 1


def test_a_record_without_a_place_is_found_by_few_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = _Arrays()
    monkeypatch.setattr(avro, "pa", arrays)
    values: list[bytes | None] = [_value(number) for number in range(1000)]
    values[617] = BAD["no place"](0)

    found = _together(values)

    assert [place for place, (_, error) in enumerate(found) if error] == [617]
    assert "has no place in its column" in str(found[617][1])
    assert arrays.made < 25
