"""Observe the attention of a running model, layer by layer, and its entropies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from isentrope.analysis.attention_statistics import fold_branches, head_entropy, uniform_entropy
from isentrope.hf.capture import CapturedAttention, capture_attention
from isentrope.models.gau.modeling import GatedAttentionUnit


def layer_entropies(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Compute the mean attention entropy of each layer in nats, (layers,) in fp64, over rows, heads and queries.

    Args:
        model: GAU-α, or a causal transformers model, extended or not.
        input_ids: (batch, n), without padding.
    """
    return torch.stack([heads.mean() for heads in head_entropies(model, input_ids)])


def head_entropies(model: nn.Module, input_ids: Tensor) -> list[Tensor]:
    """Compute the mean attention entropy of each layer's heads in nats, over rows and queries, (heads,) in fp64."""
    entropies: list[Tensor] = []
    run_observed(model, input_ids, lambda captured: entropies.append(head_entropy(captured)))
    return entropies


def observe_blocks(model: Any, input_ids: Tensor) -> list[Tensor | None]:
    """Return the blocks of far keys that each layer of a model chooses in one pass over tokens.

    Args:
        model: a transformers model extended with a recipe that has `Retrieve`.
        input_ids: (batch, n), without padding.

    Returns:
        For each layer, block numbers (batch, kv_heads, groups, blocks) as `block_selection.select_blocks` returns them;
        None for a layer that chooses nothing at this length.
    """
    layers: list[Tensor | None] = []

    def observe(captured: CapturedAttention) -> None:
        branches = fold_branches(captured)
        layers.append(next((branch.chosen.index for branch in branches if branch.chosen is not None), None))

    run_observed(model, input_ids, observe)
    return layers


def run_observed(model: Any, input_ids: Tensor, observe: Callable[[CapturedAttention], None]) -> None:
    """Run a model on tokens without logits, and call `observe` with every layer's attention; nothing is kept of it."""
    inner = getattr(model, "base_model", model)
    options = {"use_cache": False} if hasattr(inner.config, "use_cache") else {}
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(), observe_attention(model, observe):
            inner(input_ids=input_ids.to(inner.device), **options)
    finally:
        model.train(training)


@contextmanager
def observe_attention(model: nn.Module, observe: Callable[[CapturedAttention], None]) -> Iterator[None]:
    """Call `observe` for each attention layer that runs while the block lasts."""
    units = find_gated_units(model)
    with ExitStack() as stack:
        if not units:
            stack.enter_context(capture_attention(model, observe))
        for index, unit in enumerate(units):
            for handle in _add_hooks(index, unit, observe):
                stack.callback(handle.remove)
        yield


def find_gated_units(model: nn.Module) -> list[GatedAttentionUnit]:
    """List the attention layers of GAU-α; empty for other models."""
    return [module for module in model.modules() if isinstance(module, GatedAttentionUnit)]


def _add_hooks(index: int, unit: GatedAttentionUnit, observe: Callable[[CapturedAttention], None]) -> Iterator[Any]:
    """Hook a unit's query and key modules for their outputs, and the unit for the layout it is called with."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            outputs[name] = out[:, None]  # one head

        return hook

    def pass_on(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        observe(CapturedAttention(index, outputs.pop("q"), outputs.pop("k"), unit.recipe, {"layout": args[1]}))

    yield unit.q_scaleoffset.register_forward_hook(keep("q"))
    yield unit.k_scaleoffset.register_forward_hook(keep("k"))
    yield unit.register_forward_hook(pass_on)


def entropy_rows(model: Any, ids: Tensor, exact: bool = True) -> list[dict[str, Any]]:
    """Measure for each layer the mean entropy of its heads, and that of uniform attention; ready for JSON.

    Args:
        model: as for `layer_entropies`.
        ids: (batch, n), without padding.
        exact: as for `head_entropy`.
    """
    rows: list[dict[str, Any]] = []

    def observe(captured: CapturedAttention) -> None:
        rows.append(
            {
                "index": captured.index,
                "entropy": head_entropy(captured, exact).tolist(),
                "uniform": uniform_entropy(captured),
            }
        )

    run_observed(model, ids, observe)
    return rows
