"""Choose a backend and run it: the only module that compares backends."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isentrope.backends import sdpa
from isentrope.backends.band.backend import BandBackend
from isentrope.backends.blocks.backend import BlocksBackend
from isentrope.backends.chunked import ChunkedBackend
from isentrope.backends.decode.backend import DecodeBackend
from isentrope.backends.dense import DenseBackend
from isentrope.backends.flex import FlexBackend
from isentrope.backends.padding import blank_padding
from isentrope.backends.protocol import Backend, GraphPlan, Launch
from isentrope.backends.reference import ReferenceBackend
from isentrope.block_selection import choose_blocks
from isentrope.core.caching import MAX_CALL_VALUES
from isentrope.core.call import AttentionCall, is_causal, is_unmasked
from isentrope.core.compile import values_are_readable
from isentrope.core.dtypes import accumulation_dtype
from isentrope.core.frame_calls import is_better_split, split_frames
from isentrope.core.position_columns import takes_columns
from isentrope.core.rotation import is_transformed
from isentrope.core.switches import PACKED_PADDING, is_on, list_switches
from isentrope.core.tracing import can_share_in_graph
from isentrope.core.unpadding import Tokens, find_tokens, pack_call
from isentrope.entropy import compute_entropy, set_entropy_tau
from isentrope.utils.messages import format_value

REFERENCE, DENSE, SDPA, FLEX = ReferenceBackend(), DenseBackend(), sdpa.SDPABackend(), FlexBackend()
CHUNKED, DECODE, BAND, BLOCKS = ChunkedBackend(), DecodeBackend(), BandBackend(), BlocksBackend()
BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (REFERENCE, DENSE, SDPA, FLEX, CHUNKED, DECODE, BAND, BLOCKS)
}
AUTO = "auto"

# Without gradients, calls with more elements of q run a few heads at a time: outputs of branches are held until they
# are merged, and beyond 32-bit indices FlexAttention, which biased calls may run on, takes twice as long.
MAX_BRANCHED_Q_ELEMENTS = 1 << 27
MAX_BIASED_Q_ELEMENTS = (1 << 31) - 1
# Likewise on a CPU: C libraries ask the system for tensors of so many bytes anew every time, and it clears them page by
# page, which takes longer than a rotation; smaller ones are used again.
MAX_CPU_Q_BYTES = 1 << 25
CPU_PART_BYTES = 1 << 21  # a thread
# Attention weights up to which `dense` beats `chunked`, by measurement: as many as fit a CPU's caches, or crowd a GPU's
# memory, or are kept for a backward.
MAX_DENSE_WEIGHTS = {"cpu": 1 << 22, "cuda": 1 << 29}
MAX_DENSE_WEIGHTS_WITH_GRADIENT = 1 << 26

logger = logging.getLogger("isentrope")
_announced: set[tuple[str, str]] = set()


class Result(NamedTuple):
    """Output, log-sum-exp and entropy (None where not needed), and the name of the backend that ran."""

    out: Tensor
    lse: Tensor | None
    entropy: Tensor | None
    backend: str


def dispatch(call: AttentionCall, backend: str, need_lse: bool, need_entropy: bool) -> Result:
    """Run a call on the backend of this name, or on the fastest for "auto".

    Raises:
        ValueError: there is no such backend, or it cannot compute this call; nothing else runs in its place.
    """
    if call.choice is not None:
        check_backend(backend)
        if not call.layout.plain:
            name = BLOCKS.name if backend == AUTO else backend
            return Result(*_run_frames(call, backend, need_lse, need_entropy), name)
        if backend in (AUTO, BLOCKS.name) and not need_entropy:
            chosen = BLOCKS.choose_and_forward(call)
            if chosen is not None:
                return Result(chosen[0], chosen[1] if need_lse else None, None, BLOCKS.name)
        call = choose_blocks(call)
    if call.layout.padded and is_better_split(call) and choose_backend(call, backend, need_entropy) is SDPA:
        return Result(*_run_frames(call, backend, need_lse, need_entropy), SDPA.name)
    max_elements = _max_q_elements(call)
    if call.q.numel() <= max_elements or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return _run(call, backend, need_lse, need_entropy)
    if backend in (AUTO, BAND.name, BLOCKS.name) and not need_entropy and BAND.computes_all(call):
        return _run(call, backend, need_lse, need_entropy)
    return _run_by_heads(call, max_elements, backend, need_lse, need_entropy)


def prepare(call: AttentionCall, backend: str) -> Launch | None:
    """Return a launch for calls that differ from this one in q, k and v alone; None where there is none."""
    if any(branch.entropy_law is not None for branch in call.branches):
        return None
    if call.choice is not None:
        takes = backend in (AUTO, BLOCKS.name) and call.layout.plain
        return BLOCKS.prepare(call) if takes else None
    return None if call.q.numel() > _max_q_elements(call) else choose_backend(call, backend).prepare(call)


def plan_in_graph(call: AttentionCall, backend: str) -> GraphPlan | None:
    """Return a plan for calls of a graph that differ from this one in q, k and v alone; None where there is none."""
    return choose_backend(call, backend).plan_in_graph(call)


def check_backend(name: str) -> None:
    """Raise ValueError unless there is a backend of this name."""
    if name != AUTO and name not in BACKENDS:
        raise ValueError(f"backend: expected one of {AUTO}, {', '.join(BACKENDS)}, got {format_value(name)}")


def choose_backend(call: AttentionCall, name: str, need_entropy: bool = False) -> Backend:
    """Return the backend of this name if it takes the call, or the fastest that does for "auto"."""
    if name == AUTO:
        if need_entropy and _computes_entropy(call):
            _announce(BAND.name, call.q.device.type)
            return BAND
        chosen: dict[Any, Backend] = {} if call.shared is None else call.shared
        key = _make_choice_key(call) if call.shared is not None else None
        if (known := chosen.get(key)) is not None:
            return known
        backend = _choose_fastest(call)
        _announce(backend.name, call.q.device.type)
        if len(chosen) < MAX_CALL_VALUES and (not torch.compiler.is_compiling() or can_share_in_graph()):
            chosen[key] = backend
        return backend
    check_backend(name)
    backend = BACKENDS[name]
    reason = backend.refusal(call)
    if call.dropout is not None and not backend.has_weights:
        reason = "it has no attention weights to drop"
    if _has_chosen_keys(call) and not backend.chooses_keys:
        reason = "it does not choose far keys; use 'auto', 'blocks' or 'dense'"
    if reason is not None:
        raise ValueError(f"backend {name!r} cannot compute this: {reason}")
    return backend


def _make_choice_key(call: AttentionCall) -> tuple[Any, ...]:
    """Return what the choice depends on besides the layout, the branches and the heads, size and dtype of q."""
    q, k, v = call.q, call.k, call.v
    contiguous = q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    transformed = not torch.compiler.is_compiling() and is_transformed()
    state = call.needs_grad, call.dropout is None, values_are_readable(q), list_switches(), transformed
    return q.shape[0], k.shape[1], v.shape[3], contiguous, *state


def choose_uncompiled(q: Tensor) -> str:
    """Return the name of a backend for single calls on q's device, which do not repay compiling a kernel."""
    fused = q.is_cuda and q.dtype == torch.float32 and q.shape[-1] <= sdpa.MAX_HEAD_DIM
    return SDPA.name if fused else AUTO


def _choose_fastest(call: AttentionCall) -> Backend:
    if call.dropout is not None or (not torch.compiler.is_compiling() and is_transformed()):
        return DENSE  # whose gradients autograd derives: the others' own are unknown to torch.func
    if _has_chosen_keys(call):
        return DENSE if BLOCKS.refusal(call) is not None else BLOCKS
    if DECODE.refusal(call) is None:
        return DECODE
    if BAND.refusal(call) is None:
        return BAND
    fused = _choose_fused(call)
    if fused.refusal(call) is None:
        return fused
    return DENSE if _weights_fit(call) else CHUNKED


def _computes_entropy(call: AttentionCall) -> bool:
    """Return whether one pass of the band kernel computes output and entropy of more queries than a mask is for."""
    few = call.layout.queries <= sdpa.MAX_MASKED_QUERIES or call.dropout is not None
    return not few and BAND.computes_entropy(call)


def _choose_fused(call: AttentionCall) -> Backend:
    """Return whichever of SDPA and FlexAttention is faster, if they take the call."""
    branch, layout = call.branches[0], call.layout
    whole = is_unmasked(branch.region, layout) or is_causal(branch.region, layout)
    linear = branch.biased and is_causal(branch.region, layout) and takes_columns(call)
    plain = len(call.branches) == 1 and whole and (linear or not branch.biased)
    if not call.q.is_cuda or plain or layout.queries <= sdpa.MAX_MASKED_QUERIES:
        return SDPA
    if torch.compiler.is_compiling() or not sdpa.has_fused_kernels(call):
        return FLEX
    # SDPA's triangular kernels gain more than its band kernels lose
    return SDPA if sdpa.has_triangular_branch(call) else FLEX


def _has_chosen_keys(call: AttentionCall) -> bool:
    return any(branch.chosen is not None for branch in call.branches)


def _weights_fit(call: AttentionCall) -> bool:
    max_weights = MAX_DENSE_WEIGHTS.get(call.q.device.type, 1 << 22)
    if call.needs_grad:
        max_weights = min(max_weights, MAX_DENSE_WEIGHTS_WITH_GRADIENT)
    return call.q.shape[:3].numel() * call.layout.keys <= max_weights


def _announce(name: str, device: str) -> None:
    """Log once which backend was chosen."""
    if not torch.compiler.is_compiling() and (name, device) not in _announced:
        _announced.add((name, device))
        logger.info("attention: backend 'auto' runs %s on %s", name, device)


def _max_q_elements(call: AttentionCall) -> int:
    """Return how many elements q may have for all heads to run at once."""
    q, branches, most = call.q, call.branches, call.q.numel()
    if len(branches) > 1:
        most = MAX_BRANCHED_Q_ELEMENTS
    elif branches[0].biased:
        most = MAX_BIASED_Q_ELEMENTS
    if q.device.type != "cpu" or torch.compiler.is_compiling() or q.nbytes < MAX_CPU_Q_BYTES:
        return most
    if call.dropout is not None or is_transformed():
        return most
    folded = call.rotations or call.normalise or any(branch.tau is not None for branch in branches)
    return min(most, CPU_PART_BYTES * max(2, torch.get_num_threads()) // q.itemsize) if folded else most


def _run(call: AttentionCall, name: str, need_lse: bool, need_entropy: bool) -> Result:
    backend = choose_backend(call, name, need_entropy)
    if backend.computes_padding and is_on(PACKED_PADDING) and (tokens := find_tokens(call)) is not None:
        packed = pack_call(call, tokens)
        if backend.refusal(packed) is None:
            return _run_packed(packed, tokens, name, need_lse, need_entropy)
    if backend.reads_padding:
        call = blank_padding(call)
    call = set_entropy_tau(backend, call)
    if need_entropy and (all_three := backend.forward_with_entropy(call)) is not None:
        return Result(all_three[0], all_three[1] if need_lse else None, all_three[2], backend.name)
    out, lse = backend.forward(call, need_lse or need_entropy)
    if lse is None or not (need_lse or need_entropy):
        return Result(out, None, None, backend.name)
    lse = lse if backend.lse_has_gradient else lse.detach()
    entropy = None
    if need_entropy:
        entropy = compute_entropy(backend, call if backend.reads_padding else blank_padding(call), lse)
    return Result(out, lse if need_lse else None, entropy, backend.name)


def _run_packed(packed: AttentionCall, tokens: Tokens, name: str, need_lse: bool, need_entropy: bool) -> Result:
    """Run the tokens of padded rows as one packed row."""
    result = _run(packed, name, need_lse, need_entropy)
    lse = None if result.lse is None else tokens.spread(result.lse, -torch.inf)
    entropy = None if result.entropy is None else tokens.spread(result.entropy)
    return Result(tokens.spread(result.out), lse, entropy, result.backend)


def _run_frames(
    call: AttentionCall, name: str, need_lse: bool, need_entropy: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Run the rows, or documents, of a call one after another; those that choose far keys do it each on its own."""
    shape, dtype = call.q.shape[:3], accumulation_dtype(call.q)
    out = call.q.new_zeros(*shape, call.v.shape[-1])
    lse = torch.full(shape, -torch.inf, dtype=dtype, device=out.device) if need_lse else None
    entropy = torch.zeros(shape, dtype=dtype, device=out.device) if need_entropy else None
    for rows, queries, part in split_frames(call):
        result = dispatch(part, name, need_lse, need_entropy)
        for whole, values in ((out, result.out), (lse, result.lse), (entropy, result.entropy)):
            if whole is not None and values is not None:
                whole[rows, :, queries] = values
    return out, lse, entropy


def _run_by_heads(call: AttentionCall, max_elements: int, name: str, need_lse: bool, need_entropy: bool) -> Result:
    """Run a few heads after the others, so that folded operands and outputs of branches take less memory."""
    parts = list(call.split_heads(max_elements))
    if len(parts) == 1:
        return _run(call, name, need_lse, need_entropy)
    out = call.q.new_empty(*call.q.shape[:-1], call.v.shape[-1])
    lses, entropies, names = [], [], []
    while parts:
        heads, part = parts.pop(0)  # what it folds is freed with it
        out[:, heads], lse, entropy, chosen = _run(part, name, need_lse, need_entropy)
        lses.append(lse)
        entropies.append(entropy)
        names.append(chosen)
    return Result(out, _concatenate(lses), _concatenate(entropies), names[0])


def _concatenate(parts: list[Tensor | None]) -> Tensor | None:
    """Join heads, where there is anything to join."""
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors, 1) if tensors else None
