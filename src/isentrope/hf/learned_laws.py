"""A frozen model in which only the laws of its recipe take gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from isentrope.core.dtypes import lengths_as_float
from isentrope.hf.extend import extended
from isentrope.hf.extension import get_extension
from isentrope.hf.layer import get_layer
from isentrope.parts import MAX_TEMPERATURE
from isentrope.recipe import Recipe
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
        tau = _take_layer(self.logs, self.layer).to(n.dtype).exp()
        table = torch.cat((torch.ones_like(tau[:, :1]), tau), 1)
        law = interpolate_table(n.clamp_min(self.lengths[0]), self.lengths, table)
        return torch.where(n > self.lengths[0], law, torch.ones_like(n))


@dataclass(frozen=True, eq=False)
class LearnedPower:
    """The law of `Power` in one layer: τ = (n / n_tr)^γ beyond n_tr.

    Attributes:
        train_length: n_tr.
        gamma: γ, (layers, heads); an axis of 1 serves all layers, or all heads.
        layer: its index.
        keys: whose scores τ multiplies.
    """

    train_length: int
    gamma: Tensor
    layer: int
    keys: str
    count: str = "visible"

    def scale(self, n: Tensor, head_dim: int) -> Tensor:
        n = lengths_as_float(n)
        gamma = _take_layer(self.gamma, self.layer).to(n.dtype)[:, None]
        return torch.exp(gamma * torch.log(n / self.train_length).clamp_min(0)).clamp_max(MAX_TEMPERATURE)


@dataclass(frozen=True, eq=False)
class LearnedShare:
    """The law of `Share` in one layer: -β ln(max(n_far / n_ref, 1)).

    Attributes:
        reference: n_ref.
        beta: β, (layers, heads); an axis of 1 serves all layers, or all heads.
        layer: its index.
        count: what n_far counts.
        sinks: how many first keys count as near ones.
    """

    reference: int
    beta: Tensor
    layer: int
    count: str = "far"
    sinks: int = 0

    def bias(self, n_far: Tensor) -> Tensor:
        n_far = lengths_as_float(n_far)
        beta = _take_layer(self.beta, self.layer).to(n_far.dtype)[:, None]
        return -beta * torch.log(n_far / self.reference).clamp_min(0)

    def resolve(self, train_length: int | None, window: int | None) -> LearnedShare:
        return self


def _take_layer(table: Tensor, layer: int) -> Tensor:
    return table[layer if len(table) > 1 else 0]


@contextmanager
def learn_laws(model: PreTrainedModel, recipe: Recipe, set_laws: Callable[[Recipe, int], Recipe]) -> Iterator[None]:
    """Run a model under a recipe whose laws learn while the block lasts; its own parameters take no gradients.

    Args:
        model: not extended.
        recipe: with the parts that learn in closed form.
        set_laws: takes the recipe of a layer and the layer's index, and returns the recipe with learned laws.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with extended(model, recipe):
        for info in get_extension(model).layers:
            layer = get_layer(info.module)
            layer.recipe = set_laws(layer.recipe, info.index)
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
