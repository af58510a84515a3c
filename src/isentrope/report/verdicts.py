"""What can be said of a claim."""

from __future__ import annotations

from typing import Any

HOLDS, FAILS, NOT_MEASURED = "holds", "does not hold", "not measured"
OPEN = "undecided"  # the numbers are there, and do not tell
Verdict = dict[str, Any]
