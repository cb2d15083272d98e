"""Every bit and every cut of every small artefact: the intact answer never changes silently."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Corrupt, ForebayError
from forebay.format.files.segment import HEADER_BYTES
from forebay.format.frame.head import FrameHead, Verdict
from tests.format.samples import Artefact, artefacts
from tests.ledger import Ledger

_ARTEFACTS = artefacts()
_NAMES = sorted(_ARTEFACTS)


def _is_refused(artefact: Artefact, damaged: bytes) -> bool:
    try:
        return isinstance(artefact.read(damaged), Verdict)
    except ForebayError:
        return True


@pytest.mark.parametrize("name", _NAMES)
def test_no_flipped_bit_goes_unnoticed(name: str, ledger: Ledger) -> None:
    artefact = _ARTEFACTS[name]
    original = artefact.encoded

    accepted = []
    for place in range(len(original)):
        for bit in range(8):
            damaged = bytearray(original)
            damaged[place] ^= 1 << bit
            if not _is_refused(artefact, bytes(damaged)):
                accepted.append((place, bit))

    ledger.count("bit flips", n=len(original) * 8, artefact=name)
    assert accepted == []


@pytest.mark.parametrize("name", _NAMES)
def test_no_cut_goes_unnoticed(name: str, ledger: Ledger) -> None:
    """But for a segment cut between two frames: what shows that more was there is the next file."""
    artefact = _ARTEFACTS[name]
    between = set(_frame_ends(artefact)) if name == "segment.seg" else set()

    accepted = {n for n in range(len(artefact.encoded)) if not _is_refused(artefact, artefact.encoded[:n])}

    ledger.count("cuts", n=len(artefact.encoded), artefact=name)
    assert accepted == between


def _frame_ends(segment: Artefact) -> list[int]:
    heads: list[FrameHead] = segment.expected[1]
    return list(accumulate((head.length for head in heads[:-1]), initial=HEADER_BYTES))


@pytest.mark.parametrize("name", [name for name in _NAMES if name.startswith(("frame", "segment-", "live", "check"))])
def test_a_cut_is_torn_and_nothing_worse(name: str) -> None:
    artefact = _ARTEFACTS[name]

    verdicts = {artefact.read(artefact.encoded[:n]) for n in range(len(artefact.encoded))}

    assert verdicts == {Verdict.TORN}


@pytest.mark.parametrize("name", _NAMES)
def test_zeros_are_never_an_artefact(name: str) -> None:
    artefact = _ARTEFACTS[name]

    assert all(_is_refused(artefact, bytes(n)) for n in (*range(200), 4096))


@given(name=st.sampled_from(_NAMES), noise=st.binary(max_size=300))
def test_noise_is_refused_with_errors_of_ours(name: str, noise: bytes) -> None:
    assert _is_refused(_ARTEFACTS[name], noise)


@given(name=st.sampled_from(_NAMES), noise=st.binary(min_size=1, max_size=40))
def test_bytes_behind_an_artefact_never_change_it(name: str, noise: bytes) -> None:
    artefact = _ARTEFACTS[name]

    try:
        found = artefact.read(artefact.encoded + noise)
    except Corrupt:
        return

    assert found == artefact.expected or isinstance(found, Verdict)
