"""A frozen model in which only the temperatures take gradients."""

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

from isentrope.core.dtypes import lengths_as_float
from isentrope.hf.extend import extended, get_extension
from isentrope.hf.layer import get_layer
from isentrope.recipe import Recipe
from isentrope.temperatures import Fitted
from isentrope.temperatures.fitted import interpolate_table


@dataclass(frozen=True, eq=False)
class LearnedTemperature:
    """The law of `Fitted` in one layer: τ = 1 at the first of the lengths and e^logs at the others.

    Attributes:
        lengths: at which τ is given; in between it is interpolated.
        logs: (layers, heads, lengths - 1); an axis of 1 serves all layers, or all heads.
        layer: its index.
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
def learn_temperatures(
    model: PreTrainedModel, recipe: Recipe, lengths: tuple[int, ...], logs: Tensor
) -> Iterator[None]:
    """Run a model under the recipe with `LearnedTemperature` while the block lasts; only `logs` takes gradients."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    initial = Fitted(lengths, (1.0,) * len(lengths))
    with extended(model, replace(recipe, temperature=initial)):
        for layer in get_extension(model).layers:
            get_layer(layer.module).temperature = LearnedTemperature(lengths, logs, layer.index)
        try:
            for parameter in trained:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)


@contextmanager
def checkpoint_layers(model: nn.Module) -> Iterator[None]:
    """Recompute layers in the backward instead of storing their activations, while the block lasts.

    Unlike transformers' own switch this needs no training mode, which would turn dropout on.
    """
    with ExitStack() as stack:
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                stack.callback(_reset_forward, layer, layer.__dict__.get("forward"))
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        yield


def _reset_forward(layer: nn.Module, forward: object) -> None:
    del layer.forward
    if forward is not None:
        layer.__dict__["forward"] = forward
