"""Caches: bounded, shared by calls, and emptied together."""

from __future__ import annotations

import torch

import isentrope as ise
from isentrope.core import caching
from isentrope.core.caching import LRUCache, bounded_cache, clear_caches, collect_constants, get_constant
from isentrope.core.layout import Layout


def test_the_last_used_values_stay():
    cache, made = LRUCache[int, int](2), []
    for key in (1, 2, 1, 3, 1, 2):
        assert cache.get(key, lambda key=key: made.append(key) or key) == key
    assert made == [1, 2, 3, 2] and len(cache) == 2


def test_clearing_reaches_functions_layouts_and_owners():
    calls = []
    square = bounded_cache(4)(lambda x: calls.append(x) or x * x)
    layout = Layout(1, 4, 4, torch.device("cpu"))
    q = torch.randn(1, 2, 4, 8)
    assert square(3) == square(3) == 9 and calls == [3]
    ise.attention(q, q, q, "rope", layout=layout)
    kept = layout.cached("kept", lambda: object())
    assert layout.cached("kept", lambda: object()) is kept
    clear_caches()
    assert square(3) == 9 and calls == [3, 3]
    assert layout.cached("kept", lambda: object()) is not kept


def test_compiled_functions_may_be_kept():
    calls = []
    compiled = bounded_cache(4, compiled=True)(lambda x: calls.append(x) or x)
    compiled(1)
    clear_caches(keep_compiled=True)
    compiled(1)
    assert calls == [1]
    clear_caches()
    compiled(1)
    assert calls == [1, 1]


def test_what_is_cached_in_inference_mode_can_be_saved_for_a_backward():
    layout = Layout(1, 4, 4, torch.device("cpu"))
    with torch.inference_mode():
        cached = layout.cached("weights", lambda: torch.ones(4))
    x = torch.ones(4, requires_grad=True)
    (x * cached).sum().backward()
    assert x.grad is not None


def test_owners_are_held_weakly():
    before = len(caching._owners)
    cache = LRUCache[int, int](1)
    assert len(caching._owners) == before + 1
    del cache
    assert len(caching._owners) == before


def test_constants_are_made_on_the_device():
    assert torch.equal(get_constant(torch.ones, torch.device("cpu"), 3), torch.ones(3))


def test_constants_are_collected_for_graphs():
    """A graph that has been captured with the address of a constant outlives the caches that it is from."""
    constants, device = {}, torch.device("meta")  # as on a GPU: on a CPU they are made anew
    with collect_constants(constants):
        one = get_constant(torch.ones, device, 3)
        assert get_constant(torch.ones, device, 3) is one
    get_constant(torch.ones, device, 4)
    clear_caches(keep_compiled=True)
    assert list(constants.values()) == [one] and get_constant(torch.ones, device, 3) is not one
