"""Bytes written by any release of a format version stay readable, and are still written the same."""

from __future__ import annotations

import pytest

from tests.format.golden_files import GOLDEN
from tests.format.samples import artefacts

_ARTEFACTS = artefacts()


def test_every_kind_of_artefact_has_its_golden_file() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(_ARTEFACTS)


@pytest.mark.parametrize("name", _ARTEFACTS)
def test_golden_file_decodes_to_the_same_values(name: str) -> None:
    artefact = _ARTEFACTS[name]

    assert artefact.read((GOLDEN / name).read_bytes()) == artefact.expected


@pytest.mark.parametrize("name", [name for name, artefact in _ARTEFACTS.items() if artefact.stable])
def test_encoding_gives_the_golden_bytes(name: str) -> None:
    assert _ARTEFACTS[name].encoded == (GOLDEN / name).read_bytes()
