"""Caches of whatever repeats from layer to layer and from call to call. All are bounded; `clear_caches` empties them.

Nothing cached depends on the values of q, k and v, and nothing is read from these while a graph is traced (`tracing`).

Gains are medians on an H200 in bf16 (benchmarks/results/2026-11-16-h200-caches.txt): "decode" is one token of a
30-layer model (9 heads of 64, 3 key heads) at 4096 cached keys, 27 ms eagerly; "call" is one `attention` call of those
heads, 0.24 ms at 512 tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from threading import Lock
from typing import Any, Generic, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

# Layouts of whole rows and, on a CPU, of rows of given lengths, for callers that pass none. Without: call
# 0.25 → 1.2 ms, FlexAttention's at 8192 tokens 0.5 → 3.5 ms; also without `hf`'s layout cache, by which the layers of
# one forward pass share one, decode 27 → 55 ms.
MAX_LAYOUTS = 2
# Values kept with one layout, the last used of these. Without any of them: decode 27 → 61 ms.
#   built calls, by recipe     call 0.25 → 0.30 ms, decode 27 → 28 to 37 ms
#   τ and angles, by part      for layers whose recipes differ in another part; with built calls decode 27 → 48 ms
#   regions, key counts        where τ is learned, so that calls are built anew: call on a CPU 0.57 → 0.63 ms
#   visible slots (bounds)     shared by counts, masks and block masks; with those of `decode` 27 → 31 to 38 ms
#   bounds as `decode` reads   decode 27 → 32 to 35 ms
#   block masks of `flex`      call at 8192 tokens 0.5 → 2.4 ms
#   cuts of `band`             call 0.245 → 0.255 ms
#   padded slots               on a CPU, a padded call at 64 tokens 3.0 → 3.2 ms
#   a model's own angles       decode at 128 keys 24 → 41 ms
MAX_LAYOUT_VALUES = 16
# Built calls of one layout and position method, as many as a model has layers, and the largest τ kept with one.
MAX_BUILT_CALLS = 256
MAX_TAU_ELEMENTS = 1 << 20
# Values kept with one built call: what a backend makes of its branches, and the backends chosen for it, by what differs
# between its uses: batch, key heads, memory order, gradients, switches. A choice asks every backend in turn, in Python,
# at each layer of each decoded token.
MAX_CALL_VALUES = 16
# Tables of laws for one query a row, at most 1 MiB each in fp32: 28 operations of a decoding step become 4. Laws may
# differ from layer to layer, and a layer has two: with fewer tables than laws each would be computed at every step.
MAX_LAW_TABLES = 256
# Recipes by their text: call 0.24 → 0.50 ms.
MAX_RECIPE_TEXTS = 256
# Compiled functions: 0.3 s to compile one again with a warm compiler cache, in place of 3 ms.
MAX_COMPILED_FUNCTIONS = 256
# Constants on a GPU, not for speed: while a CUDA graph is captured nothing can be copied from the host. Enough for
# the tables of every layer of a model.
MAX_CONSTANTS = 1024
# Launches by all that their compiled kernels depend on; the kernels themselves are kept by Triton.
MAX_LAUNCHES = 1024
# Compute capabilities: call 0.24 → 0.25 ms.
MAX_DEVICES = 64

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
P = ParamSpec("P")


class Clearable(Protocol):
    def clear(self) -> None: ...


_functions: list[Callable[[], object]] = []
_compiled_functions: list[Callable[[], object]] = []
_owners: WeakSet[Any] = WeakSet()
_lock = Lock()  # models may run in several threads
_ABSENT = object()
_collected: ContextVar[dict[int, Tensor] | None] = ContextVar("collected constants", default=None)


def clear_caches(*, keep_compiled: bool = False) -> None:
    """Empty the caches of the package, which frees their memory; the next calls fill them again.

    Args:
        keep_compiled: keep compiled functions, which take seconds to compile anew.
    """
    for clear in (*_functions, *(() if keep_compiled else _compiled_functions)):
        clear()
    for owner in list(_owners):
        owner.clear()


def register_clear(clear: Callable[[], object]) -> None:
    """Have `clear_caches` call a function; for caches that live as long as their module."""
    _functions.append(clear)


def register_owner(owner: Clearable) -> None:
    """Have `clear_caches` call `owner.clear()` for as long as the object lives."""
    _owners.add(owner)


def bounded_cache(max_entries: int, compiled: bool = False) -> Callable[[Callable[P, V]], Callable[P, V]]:
    """Decorate a function to keep its last `max_entries` results."""

    def decorate(function: Callable[P, V]) -> Callable[P, V]:
        cached: Any = lru_cache(max_entries)(function)
        (_compiled_functions if compiled else _functions).append(cached.cache_clear)
        return cached

    return decorate


class LRUCache(Generic[K, V]):
    """The `max_entries` values used last."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self._values = OrderedDict[K, V]()
        register_owner(self)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return what `make` returned the first time."""
        value: Any = self.find(key, _ABSENT)
        if value is not _ABSENT:
            return value
        with torch.inference_mode(False):  # or a later call could not save it for its backward
            value = make()
        with _lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self.max_entries:
                self._values.popitem(last=False)
        return value

    def find(self, key: K, default: Any = None) -> Any:
        """Return the value of a key, which is then the last used, or a default."""
        with _lock:
            value = self._values.get(key, default)
            if value is not default:
                self._values.move_to_end(key)
        return value

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        with _lock:
            self._values.clear()


def get_constant(make: Callable[..., Tensor], device: torch.device, *arguments: Hashable) -> Tensor:
    """Return make(*arguments) on a device; on a GPU the same tensor every time."""
    if device.type == "cpu" or torch.compiler.is_compiling() or type(torch.empty(0)) is not Tensor:
        return make(*arguments).to(device)
    constant = _get_constant(make, device, *arguments)
    if (collected := _collected.get()) is not None:
        collected[id(constant)] = constant
    return constant


@contextmanager
def collect_constants(constants: dict[int, Tensor]) -> Iterator[None]:
    """Add what `get_constant` returns to a dictionary, by its id, for graphs that are captured with its address."""
    token = _collected.set(constants)
    try:
        yield
    finally:
        _collected.reset(token)


@bounded_cache(MAX_CONSTANTS)
def _get_constant(make: Callable[..., Tensor], device: torch.device, *arguments: Hashable) -> Tensor:
    with torch.inference_mode(False):  # it serves calls with gradients too
        return make(*arguments).to(device)
