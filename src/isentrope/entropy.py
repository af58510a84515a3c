"""Entropy of attention weights from log-sum-exps, without the weights."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import torch
from torch import Tensor

from isentrope.backends.chunked import ChunkedBackend
from isentrope.backends.padding import blank_padding
from isentrope.backends.protocol import Backend
from isentrope.backends.reference import ReferenceBackend, compute_weights
from isentrope.backends.sdpa import SDPABackend
from isentrope.core.call import AttentionCall, FoldedBranch
from isentrope.core.compile import maybe_compile
from isentrope.core.region import band

SDPA, CHUNKED = SDPABackend(), ChunkedBackend()  # substitutes: of single branches, and in fp64
VALUE_SIZE = 16  # of the positions that are averaged as values: the smallest that kernels take


def set_entropy_tau(backend: Backend, call: AttentionCall) -> AttentionCall:
    """Return the call with the τ of laws that take it from the entropy of attention without them.

    Args:
        backend: the one that will compute the call; it computes the entropy too.
        call: what is attended to. τ is a constant to its gradients.
    """
    if all(branch.entropy_law is None for branch in call.branches):
        return call
    with torch.no_grad():
        plain = replace(call, branches=[replace(branch, entropy_law=None) for branch in call.branches])
        entropy = compute_entropy(backend, plain if backend.reads_padding else blank_padding(plain))
        branches = [
            branch if (law := branch.entropy_law) is None else replace(before, tau=law.by_entropy(entropy))
            for branch, before in zip(call.branches, plain.branches, strict=True)
        ]
    return replace(call, branches=branches)


def compute_entropy(backend: Backend, call: AttentionCall, lse: Tensor | None = None) -> Tensor:
    """Return H = Σ_j p_j (L - s_j), branch by branch: with V := K attention gives Σ_j p_j k_j, and s is linear in k.

    Args:
        backend: the one that computed `lse`; it computes the means too, where it takes branches alone.
        call: what was attended to, its padding blank.
        lse: L, the log-sum-exp of all scores, where it is known.
    """
    if isinstance(backend, ReferenceBackend):  # by definition, and with gradients
        return torch.special.entr(compute_weights(call)[0]).sum(-1)
    with torch.no_grad():
        parts = [(branch, *_compute_mean_score(backend, branch)) for branch in map(_detach, call.fold())]
        if lse is None:
            shifted = [part if x.offset is None else part + x.offset.to(part.dtype) for x, _, part in parts]
            lse = torch.logsumexp(torch.stack(shifted), 0)
        entropy = torch.zeros_like(lse)
        anchor = torch.where(lse == -inf, 0.0, lse)
        for branch, score, branch_lse in parts:
            level = anchor if branch.offset is None else anchor - branch.offset.to(anchor.dtype)
            if score is None:
                entropy += CHUNKED.sum_surprise(branch, level)
                continue
            entropy += torch.exp(branch_lse - level) * (level - score)
            if branch.slopes is not None:
                entropy -= _compute_mean_bias(backend, branch, level)
        return entropy.clamp_min(0)  # rounding may put a query that sees one key a little below


def _detach(branch: FoldedBranch) -> FoldedBranch:
    """Return the branch with V := K, without gradients."""
    k, offset = branch.k.detach(), branch.offset
    return replace(branch, q=branch.q.detach(), k=k, v=k, offset=None if offset is None else offset.detach())


def _compute_mean_score(backend: Backend, branch: FoldedBranch) -> tuple[Tensor | None, Tensor]:
    """Return Σ_j p_j s_j of a branch alone, less its biases, and its log-sum-exp; None where s is not linear in k."""
    if branch.distance_law is not None:
        return None, _forward(backend, branch, CHUNKED)[1]
    mean_key, lse = _forward(backend, branch, SDPA)
    dot = maybe_compile(_dot, (branch.q, mean_key), branch.q.shape[-1])
    return branch.scale * dot(branch.q, mean_key, lse.dtype), lse


def _forward(backend: Backend, branch: FoldedBranch, substitute: Backend) -> tuple[Tensor, Tensor]:
    """Compute a branch alone, through another backend where the first refuses it."""
    call = branch.as_call()
    out, lse = (backend if backend.refusal(call) is None else substitute).forward(call, need_lse=True)
    assert lse is not None
    return out, lse


def _dot(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return (a.to(dtype) * b.to(dtype)).sum(-1)


def _compute_mean_bias(backend: Backend, branch: FoldedBranch, anchor: Tensor) -> Tensor:
    """Return Σ_j p_j bias_j. On each side of the query |Δ| is linear in the key's position, so its mean suffices.

    Positions cancel, all but the distance, so their mean is taken in fp64: by row chunks where the backend has none.
    """
    assert branch.slopes is not None
    position = branch.layout.key[:, None, :, None].double()
    v = position.expand(branch.k.shape[0], branch.k.shape[1], -1, VALUE_SIZE).contiguous()
    exact = replace(branch, q=branch.q.double(), k=branch.k.double(), v=v, traced=None)
    total = torch.zeros_like(anchor, dtype=torch.float64)
    for sign, side in ((1, band(-inf, 1)), (-1, band(1, inf))):
        region = branch.layout.simplify(branch.region & side)
        if region.spans:
            mean_position, side_lse = _forward(backend, replace(exact, region=region), CHUNKED)
            distance = sign * (branch.layout.query[:, None] - mean_position[..., 0])
            total -= torch.exp(side_lse - anchor) * branch.slopes[:, None] * distance
    return total.to(anchor.dtype)
