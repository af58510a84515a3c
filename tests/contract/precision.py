"""Plain attention in low precision, and how far from fp64 a backend may be beside it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from isentrope.builder import Inputs, build_call
from tests.contract.matrix import NAMES


class Plain(NamedTuple):
    """Attention as one would write it by hand, and the sizes (norms) of what differences in it are taken of."""

    results: list[torch.Tensor]  # output, lse, entropy, dq, dk, dv
    subtracted: dict[str, float]


def eager(recipe, setting, causal, dtype, device):
    """Plain attention in this dtype."""
    q, k, v = (x.requires_grad_() for x in setting.tensors(dtype, device))
    recipe = recipe.resolve()
    options = setting.arguments(device)
    scores = size = None
    branches = build_call(Inputs(q, k, v, causal=causal, **options), recipe).fold()
    for branch in branches:
        s = branch.scale * (branch.q @ branch.k.repeat_interleave(branch.groups, 1).mT)
        # the mean score is an inner product, whose rounding is relative to the sum of its absolute terms
        terms = branch.scale * (_absolute(branch.q) @ _absolute(branch.k, branch.groups).mT)
        if (bias := branch.bias()) is not None:
            s = s + bias.to(dtype)
            terms = terms + bias.float().abs()
        if branch.offset is not None:
            s = s + branch.offset[..., None].to(dtype)
            terms = terms + branch.offset[..., None].float().abs()
        size = torch.where(branch.mask(), terms, torch.zeros_like(terms) if size is None else size)
        scores = torch.where(branch.mask(), s, torch.full_like(s, -torch.inf) if scores is None else scores)
    seen = (scores > -torch.inf).any(-1, keepdim=True)
    p = torch.softmax(scores.masked_fill(~seen, 0), -1, dtype=torch.float32) * seen
    out = p.to(dtype) @ v.repeat_interleave(setting.heads // setting.kv_heads, 1)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gradients = torch.autograd.grad((out * weight.to(out)).sum(), (q, k, v))
    results = [out, torch.logsumexp(scores.float(), -1), torch.special.entr(p).sum(-1), *gradients]
    weights = p.detach()
    lse, mean = results[1].detach().abs(), (weights * size).sum(-1)
    # what rounding the operands of a score, by eps of its absolute terms, does to weights and so to their mean of v
    moved = (weights * (size + mean[..., None])) @ _absolute(v, setting.heads // setting.kv_heads)
    size = torch.where(lse.isfinite(), lse, 0) + mean
    sizes = {"out": moved, "lse": mean, "entropy": size}
    subtracted = {name: x.double().norm().item() for name, x in sizes.items()}
    subtracted |= _subtracted(branches, p.detach(), weight.to(p), q, k)
    return Plain([x.detach() for x in results], subtracted)


def _subtracted(branches, p, weight, q, k):
    """Gradients with absolute terms: ds = p (dp - Σ p dp) is a difference, and 0 for a query that sees one key."""
    dp = weight.abs() @ _absolute(branches[0].v, branches[0].groups).mT
    ds = p * (dp + (p * dp).sum(-1, keepdim=True))
    dq, dk = 0.0, 0.0
    for branch in branches:
        part = branch.scale * ds * branch.mask()
        of_keys = (part.mT @ _absolute(branch.q)).unflatten(1, (-1, branch.groups)).sum(2)
        # what a rotation keeps, and τ and norms change
        dq = dq + part @ _absolute(branch.k, branch.groups) * _gain(branch.q, q)
        dk = dk + of_keys * _gain(branch.k, k)
    dv = (p.mT @ weight.abs()).unflatten(1, (-1, branches[0].groups)).sum(2)
    return {name: x.double().norm().item() for name, x in (("dq", dq), ("dk", dk), ("dv", dv))}


def _absolute(x, groups=1):
    return x.detach().float().abs().repeat_interleave(groups, 1)


def _gain(folded, raw):
    a, b = (x.detach().float().norm(dim=-1, keepdim=True) for x in (folded, raw))
    return a / b.clamp_min(1e-30)


def compare(ours, truth, plain, backend, what):
    """Results of a backend against those of the fp64 reference."""
    dtype, device = ours[0].dtype, ours[0].device.type
    eps = torch.finfo(dtype).eps
    # the GPU's fp32 kernel multiplies in three TF32 products, whose small parts it drops
    tf32 = (backend, dtype, device) == ("sdpa", torch.float32, "cuda")
    once, through_lse = roundings(dtype, truth[NAMES.index("lse")])
    for name, a, b, c in zip(NAMES, ours, plain.results, truth, strict=False):
        # entropy is a difference: one rounding of what is subtracted, not of what is left
        floor = (
            eps * plain.subtracted[name] / max(c[c.isfinite()].norm().item(), 1e-30) if name in plain.subtracted else 0
        )
        floor = 2 * max(floor, eps) if tf32 else floor
        least = once if name in ("lse", "entropy") else through_lse
        bound = (3 if tf32 else 2) * max(distance(b, c), least) + floor
        assert distance(a, c) <= bound, f"{name} of {what} on {backend} in {dtype}"


def distance(x, reference):
    finite = reference.isfinite()
    assert torch.equal(x.isfinite(), finite)
    norm = reference[finite].norm().clamp_min(1e-30)
    return ((x[finite].double() - reference[finite]).norm() / norm).item()


def roundings(dtype, lse):
    """The least distance that a result may be counted at: of one that is stored, and of one from weights e^{s - L}.

    Each entry of a stored result is off by up to eps/2 of itself, so the whole by up to eps/2 in norm. The log-sum-exp
    L is stored too, in fp32 at least: off by up to eps/2 |L|, it multiplies all weights of its query, and so its output
    and gradients, by e^{eps/2 |L|}. Where plain attention comes nearer, that is luck of its order of summation.
    """
    once = torch.finfo(dtype).eps / 2
    stored = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
    largest = lse[lse.isfinite()].abs().max().item() if lse.isfinite().any() else 0.0
    return once, max(once, stored * largest)
