"""Values in error messages, suggestions and lists of numbers."""

from __future__ import annotations

import pytest

from isentrope.utils.messages import MAX_VALUE_CHARACTERS, format_value, suggest
from isentrope.utils.parsing import parse_numbers


def test_values_in_errors_are_short():
    assert format_value("a\nb") == repr("a\nb")
    assert format_value({"a": 1}) == "{'a': 1}"
    long = format_value("x" * 1000)
    assert len(long) < MAX_VALUE_CHARACTERS + 30 and long.endswith("… (1002 characters)")
    assert format_value(10**5000) == "int too large to print"


def test_suggestions():
    assert suggest("rop", ["rope", "pi"]) == "; did you mean 'rope'?"
    assert suggest("zzz", ["rope", "pi"]) == "; known are pi, rope"
    assert suggest(3, ["rope"]) == "; known are rope"


def test_lists_of_numbers():
    assert parse_numbers("lengths", "512,1024") == (512, 1024)
    assert parse_numbers("depths", "0.5, 1", float) == (0.5, 1.0)
    for text in ("", "1,,2", "1;2", "1.5"):
        with pytest.raises(ValueError, match=r"lengths: expected numbers separated by commas such as 4,8, got"):
            parse_numbers("lengths", text, example="4,8")
