"""One query a row against a cache of raw keys, in one Triton kernel: the step that generation is made of.

Keys are read once. A block of them in the near region is rotated in registers, far ones are scored as they are, and
everything that changes from token to token (visible slots, angles, τ) is read from the device, so that a captured CUDA
graph stays valid. The keys of a row are divided among many programs and their partial outputs merged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isentrope.backends.protocol import Backend, Launch, triton_refusal
from isentrope.core.call import AttentionCall, describe_tensors
from isentrope.core.layout import MAX_SPANS

MAX_BRANCHES = 3  # the third with the angles of the second


class DecodeBackend(Backend):
    """The decoding kernel, without gradients."""

    name = "decode"
    gradient = "none"
    reads_padding = False

    def refusal(self, call: AttentionCall) -> str | None:
        if call.q.shape[2] != 1:
            return "it takes one query a row, got more"  # a number in the text would bind a traced graph to its length
        if call.q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"it does not take {call.q.dtype}"
        if len(call.branches) > MAX_BRANCHES or any(len(b.region.spans) > MAX_SPANS for b in call.branches):
            return f"it takes {MAX_BRANCHES} branches of {MAX_SPANS} spans"
        if len(call.branches) == MAX_BRANCHES and not call.branches[2].rotates_like(call.branches[1]):
            return "it takes a third branch only with the angles of the second"
        return "it has no backward" if call.needs_grad else triton_refusal(call)

    def forward(self, call: AttentionCall, need_lse: bool) -> tuple[Tensor, Tensor | None]:
        q, k, v = call.q, call.k, call.v
        if torch.compiler.is_compiling():
            out, lse = torch.ops.isentrope.decode([q, k, v], *_list_operands(call), call.scale, call.normalise)
            return out, lse
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32) if need_lse else None
        self.prepare(call).run(q, k, v, out, lse)
        return out, lse

    def prepare(self, call: AttentionCall) -> Launch:
        q, k, v = call.q, call.k, call.v

        def make() -> Launch:
            from isentrope.backends.decode.kernel import DecodeLaunch  # Triton may not be installed

            launch: Launch = DecodeLaunch(q, k, v, *_list_operands(call), call.scale, call.normalise)
            return launch

        return call.cached(("decode", describe_tensors(q, k, v)), make)


def _list_operands(call: AttentionCall) -> tuple[Tensor, list[Tensor], list[bool], list[Tensor | None]]:
    """Return visible slots, angles, which queries and keys these rotate, and the factors, as a launch takes them."""
    bounds = call.layout.slots_of_one_query(tuple(branch.region for branch in call.branches))
    pairs = [angles for branch in call.branches[:2] for angles in (branch.query_angles, branch.key_angles)]
    rotated = [angles is not None for angles in pairs]
    rotations = [x for angles in pairs for x in angles or ()]
    factors = [branch.tau for branch in call.branches] + [branch.offset for branch in call.branches]
    return bounds, rotations, rotated, factors


def _run(
    qkv: list[Tensor],
    bounds: Tensor,
    rotations: list[Tensor],
    rotated: list[bool],
    factors: list[Tensor | None],
    scale: float,
    normalise: bool,
) -> tuple[Tensor, Tensor]:
    from isentrope.backends.decode.kernel import DecodeLaunch

    q, k, v = qkv
    out, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)
    DecodeLaunch(q, k, v, bounds, rotations, rotated, factors, scale, normalise).run(q, k, v, out, lse)
    return out, lse


_decode = torch.library.custom_op("isentrope::decode", _run, mutates_args=())


@_decode.register_fake
def _(qkv: list[Tensor], *rest: object) -> tuple[Tensor, Tensor]:
    q, _, v = qkv
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)
