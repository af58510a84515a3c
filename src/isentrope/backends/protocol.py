"""The interface of all backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from isentrope.core.call import AttentionCall
from isentrope.core.compile import can_run_triton
from isentrope.core.rotation import is_transformed

TRITON_HEAD_DIMS = (32, 64, 128, 256)


class Launch(Protocol):
    """A call of which all is worked out but the addresses of its tensors; it holds none of q, k and v."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Attend with tensors laid out like those that it was prepared for, in a device's current stream.

        Written are the output, contiguous as (batch, heads, queries, dv), and a log-sum-exp where one is given.
        """
        ...


class GraphPlan(Protocol):
    """A call in a graph that is being traced, of which all is worked out but its tensors."""

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output for tensors of the same sizes, without gradients."""
        ...


class Backend(ABC):
    """One way to compute an `AttentionCall`. It uses no recipes and, a shared kernel aside, no other backend.

    name: as in `attention(backend=...)`.
    gradient: "autograd" through what `forward` runs, "merged" (see `merge`), or "none".
    reads_padding: whether padded keys enter products, so that NaN in them would reach the output.
    computes_padding: whether padding takes as long as tokens, so that padded rows are better packed.
    has_weights: whether the attention weights exist, as dropout needs.
    lse_has_gradient: whether gradients flow through the log-sum-exp too.
    chooses_keys: whether it takes branches with chosen blocks of keys.
    """

    name: ClassVar[str]
    gradient: ClassVar[Literal["autograd", "merged", "none"]] = "autograd"
    reads_padding: ClassVar[bool] = True
    computes_padding: ClassVar[bool] = False
    has_weights: ClassVar[bool] = False
    lse_has_gradient: ClassVar[bool] = False
    chooses_keys: ClassVar[bool] = False

    def refusal(self, call: AttentionCall) -> str | None:
        """Return why the backend cannot compute a call, or None if it can; q and k are not folded for that."""
        return None

    @abstractmethod
    def forward(self, call: AttentionCall, need_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Return the output (batch, heads, queries, dv) and the log-sum-exp (batch, heads, queries).

        A query without visible keys gives zeros and -inf. The log-sum-exp may be None unless it is needed.
        """

    def prepare(self, call: AttentionCall) -> Launch | None:
        """Return a launch for calls that differ from this one in q, k and v alone; None where it has none."""
        return None

    def plan_in_graph(self, call: AttentionCall) -> GraphPlan | None:
        """Return a plan for calls of a graph that differ from this one in q, k and v alone; None where it has none."""
        return None

    def forward_with_entropy(self, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return output, log-sum-exp and the entropy of each query's weights, None where that takes a further pass."""
        return None


def triton_refusal(call: AttentionCall, takes_slopes: bool = False) -> str | None:
    """Return why Triton kernels that rotate queries themselves cannot take a call, gradients aside."""
    q, k, v, rotations = call.q, call.k, call.v, call.rotations
    if not can_run_triton(q):
        return "it needs Triton and a GPU"
    if not torch.compiler.is_compiling() and is_transformed():
        return "it has no forward-mode derivative, and is not for torch.func"
    if q.shape[-1] not in TRITON_HEAD_DIMS or v.shape[-1] not in TRITON_HEAD_DIMS:
        sizes = ", ".join(map(str, TRITON_HEAD_DIMS))
        return f"it takes head sizes {sizes}, got {q.shape[-1]} and {v.shape[-1]}"
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        return "it takes contiguous vectors, got a stride between their entries"
    if any(b.distance_law is not None or (b.slopes is not None and not takes_slopes) for b in call.branches):
        return "it has no bias or factor by distance"
    if rotations and (call.interleaved or any(2 * cos.shape[-1] != q.shape[-1] for cos, _ in rotations)):
        return "it rotates whole vectors in half layout"
    return None
