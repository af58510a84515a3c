"""`benchmarks/registers.py`: kernels compile for a card that is not there, and fit it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from isentrope.core.compile import HAS_TRITON, TRITON_INTERPRETED
from isentrope.core.switches import list_switches

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.skipif(not HAS_TRITON or TRITON_INTERPRETED, reason="kernels are compiled by Triton alone")
def test_kernels_fit_a_small_card(monkeypatch):
    """One with little shared memory and no copy engine, where keys are loaded by pointers."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    registers, switches = importlib.import_module("registers"), list_switches()
    calls = dict(registers.list_calls())
    rows = list(registers.compile_call(1, registers.CARDS["sm_89 (L4, RTX 40)"], calls["ReRoPE, d 64"]))
    assert {row["kernel"] for row in rows} == {"_rotate_and_scale", "_band"}
    assert all(row["registers"] <= 255 and not row["spilled_bytes"] for row in rows)
    assert all(0 <= row["shared_bytes"] <= row["limit_bytes"] == 99 << 10 for row in rows)
    assert "| 2 |" in registers.render_rows([{"card": "L4", "call": "ReRoPE", **row} for row in rows])
    assert list_switches() == switches


@pytest.mark.skipif(not HAS_TRITON or TRITON_INTERPRETED, reason="kernels are compiled by Triton alone")
def test_the_kernels_for_hopper_compile(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    registers = importlib.import_module("registers")
    calls = dict(registers.list_calls())
    card = registers.CARDS["sm_90 (H100, H200)"]
    rows = list(registers.compile_call(2, card, calls["ReRoPE, long, padded, d 64"]))
    assert {row["kernel"] for row in rows} == {"_rotate_keys", "_attend_spans"}
    backward = list(registers.compile_call(2, card, calls["ReRoPE, long, padded, backward, d 128"]))
    kernels = {"_attend_spans", "_rotate_and_scale", "_compute_row_terms"}
    assert {row["kernel"] for row in backward} == kernels | {"compute_key_gradients", "compute_query_gradients"}
    assert all(row["shared_bytes"] <= row["limit_bytes"] for row in (*rows, *backward))
