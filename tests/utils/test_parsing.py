"""Lengths given as text: tokens, or a multiple of the training length."""

from __future__ import annotations

import pytest

from isentrope.utils.parsing import is_multiple, parse_length


@pytest.mark.parametrize(
    ("length", "tokens"), [(300, 300), ("3_00", 300), (" 4X ", 256), ("4×train", 256), ("1.5x", 96), ("0.5x", 32)]
)
def test_lengths(length, tokens):
    assert parse_length(length, 64) == tokens
    assert is_multiple(length) == (tokens != 300)


@pytest.mark.parametrize("length", ["far", "4y", "-4x", "x", "", "0", "0x", 0, -1, True, 4.0, None, "٤x", "٤"])
def test_what_is_no_length(length):
    with pytest.raises(ValueError, match="length: expected tokens such as 8192, or 4x the training length, got"):
        parse_length(length, 64)


def test_a_multiple_of_an_unknown_length():
    assert parse_length("300", None) == 300
    with pytest.raises(ValueError, match=r"lengths: .* the model states no training length, got '4x'"):
        parse_length("4x", None, "lengths")
