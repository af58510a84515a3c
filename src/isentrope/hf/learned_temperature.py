"""A frozen model whose temperatures alone take gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from isentrope.hf.extend import extended, extension
from isentrope.hf.layer import layer_of
from isentrope.recipe import Recipe
from isentrope.temperatures import Fitted
from isentrope.temperatures.fitted import interpolate_table
from isentrope.temperatures.laws import lengths_as_float


@dataclass(frozen=True, eq=False)
class Tempered:
    """The law of `Fitted` in one layer: τ = 1 at the first of the lengths and e^logs at the others.

    logs: (layers, heads, lengths - 1); an axis of 1 serves all layers, or all heads.
    """

    lengths: tuple[int, ...]
    logs: Tensor
    layer: int
    count: str = "visible"

    def scale(self, n: Tensor, head_dim: int) -> Tensor:
        n = lengths_as_float(n)
        tau = self.logs[self.layer if len(self.logs) > 1 else 0].to(n.dtype).exp()
        table = torch.cat((torch.ones_like(tau[:, :1]), tau), 1)
        law = interpolate_table(n.clamp_min(self.lengths[0]), self.lengths, table)
        return torch.where(n > self.lengths[0], law, torch.ones_like(n))


@contextmanager
def tempered(model: PreTrainedModel, recipe: Recipe, lengths: tuple[int, ...], logs: Tensor) -> Iterator[None]:
    """While the block lasts, a model follows the recipe with the law `Tempered`, and only `logs` takes gradients."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    still = Fitted(lengths, (1.0,) * len(lengths))
    with extended(model, replace(recipe, temperature=still)):
        for layer in extension(model).layers:
            layer_of(layer.module).temperature = Tempered(lengths, logs, layer.index)
        try:
            for parameter in trained:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """While the block lasts, a backward works layers out anew instead of keeping what they hold.

    Unlike transformers' own switch it asks for no training mode, which would turn dropout on.
    """
    with ExitStack() as stack:
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                stack.callback(_put_back, layer, layer.__dict__.get("forward"))
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        yield


def _put_back(layer: nn.Module, forward: object) -> None:
    del layer.forward
    if forward is not None:
        layer.__dict__["forward"] = forward
