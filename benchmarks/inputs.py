"""Random q, k and v, and the baselines on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from measure import Call, Sizes, times
from methods import Method
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import isentrope as ise
from isentrope.core.caching import clear_caches
from isentrope.core.compile import copy_function

PLAIN = "RoPE + SDPA"
LAST, AWAY = 4, 0.05  # queries compared with the reference, and what bf16 may make of them


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


@cache
def rope_for(n: int, grad: bool, device: str) -> Callable[..., Tensor]:
    """Compiled for one length, with a code object of its own: past a few lengths torch quietly stops compiling one."""
    return torch.compile(copy_function(rope), dynamic=False, fullgraph=True) if device == "cuda" else rope


@cache
def flex_for(n: int) -> Callable[..., Tensor]:
    return torch.compile(copy_function(_flex), dynamic=False, fullgraph=True)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    return flex_attention(q, k, v, block_mask=mask)


class Inputs:
    """Random q, k and v of one length, one length at a time, and the baselines on them."""

    def __init__(self, size: Sizes) -> None:
        self.size, self.n, self.grad = size, 0, False
        self.chosen: dict[tuple[int, bool], SDPBackend] = {}

    def at(self, n: int, grad: bool = False) -> Inputs:
        if (n, grad) == (self.n, self.grad):
            return self
        self.free()
        size, make = self.size, torch.Generator(self.size.device).manual_seed(0)
        shape, options = (1, size.heads, n, size.size), {"device": size.device, "dtype": size.dtype, "generator": make}
        self.q, self.k, self.v = (torch.randn(shape, **options).requires_grad_(grad) for _ in range(3))
        theta = 1e4 ** (-torch.arange(0, size.size, 2, device=size.device) / size.size)
        angle = torch.arange(n, device=size.device)[:, None] * theta
        self.cos, self.sin = angle.cos(), angle.sin()
        self.out_grad = torch.randn(shape, **options) if grad else None
        self.n, self.grad = n, grad
        return self

    def free(self) -> None:
        """Let go of everything, also of what attention keeps for a layout."""
        self.q = self.k = self.v = self.cos = self.sin = self.out_grad = None  # type: ignore[assignment]
        self.n = 0
        clear_caches(keep_compiled=True)
        if self.size.device == "cuda":
            torch.cuda.empty_cache()

    def call(self, method: Method, **options: Any) -> Call:
        return self._run(lambda: ise.attention(self.q, self.k, self.v, method.recipe, causal=True, **options))

    def baseline(self) -> tuple[Call, str]:
        """RoPE by a compiled function, then SDPA on the fastest of its backends, and what that is called."""
        if self.size.device != "cuda":
            return self._plain(None), PLAIN
        backend = self._fastest()
        return self._plain(backend), f"{PLAIN} ({backend.name.split('_')[0].lower()})"

    def _fastest(self) -> SDPBackend:
        """The choice for a length; beyond the long one it is that of the long one."""
        known = self.chosen.get((self.n, self.grad))
        if known is None and self.n > self.size.long:
            known = self.chosen.get((self.size.long, self.grad))
        if known is None:
            taken = {}
            for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
                try:
                    taken[backend] = times((self._plain(backend),), self.size)[0]
                except RuntimeError:  # not on this card, or not at this shape
                    continue
            known = min(taken, key=taken.__getitem__) if taken else SDPBackend.EFFICIENT_ATTENTION
            self.chosen[self.n, self.grad] = known
        return known

    def _plain(self, backend: SDPBackend | None) -> Call:
        turn = rope_for(self.n, self.grad, self.size.device)

        def attend() -> Tensor:
            q, k = (turn(x, self.cos, self.sin) for x in (self.q, self.k))
            if backend is None:
                return F.scaled_dot_product_attention(q, k, self.v, is_causal=True)
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, self.v, is_causal=True)

        return self._run(attend)

    def away(self, out: Any, method: Method) -> float:
        """How far the last queries are from the reference at most, as a share of its largest entry; 5 % is an error."""
        last = self.q[:, :, -LAST:]
        expected = ise.attention(last, self.k, self.v, method.recipe, causal=True, backend="dense").float()
        found = float((out[:, :, -LAST:].float() - expected).abs().max() / expected.abs().max())
        if not found < AWAY:
            raise AssertionError(f"{found:.1%} away from the reference")
        return found

    def flex_window(self, window: int, rotate: bool) -> Call:
        """FlexAttention's own sliding window: compiled, its block mask built beforehand."""
        mask = torch.compile(create_block_mask)(
            lambda b, h, i, j: (i >= j) & (i - j < window), None, None, self.n, self.n, device=self.size.device
        )
        attend = flex_for(self.n)
        turn = rope_for(self.n, self.grad, self.size.device)

        def run() -> Tensor:
            q, k = (turn(x, self.cos, self.sin) if rotate else x for x in (self.q, self.k))
            return attend(q, k, self.v, mask)

        return self._run(run)

    def _run(self, attend: Callable[[], Any]) -> Call:
        """The call without gradients, or forward and backward."""

        def forward() -> object:
            with torch.no_grad():
                return attend()

        def both() -> object:
            return torch.autograd.grad(attend(), (self.q, self.k, self.v), self.out_grad)

        return both if self.grad else forward
