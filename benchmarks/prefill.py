"""Read a long text in chunks: a cache allocated once, losses without a table of all logits, plain causal attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

import isentrope as ise
from isentrope.evaluation.perplexity import get_decoder, losses_from_hidden

PLAIN_IMPLEMENTATION = "causal_in_chunks"


class AllocatedLayer(DynamicLayer):
    """Keys and values in memory for `length` tokens, allocated at the first update: nothing is copied as they grow."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.memory: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        first = self.get_seq_length()
        last = first + key_states.shape[-2]
        if last > self.length:
            raise ValueError(f"cache: expected at most {self.length} tokens, got {last}; allocate more")
        if self.memory is None:
            self.lazy_initialization(key_states, value_states)
            states = (key_states, value_states)
            self.memory = tuple(x.new_empty(*x.shape[:-2], self.length, x.shape[-1]) for x in states)  # type: ignore[assignment]
        assert self.memory is not None
        for memory, states in zip(self.memory, (key_states, value_states), strict=True):
            memory[..., first:last, :] = states
        self.keys, self.values = (memory[..., :last, :] for memory in self.memory)
        return self.keys, self.values


class AllocatedCache(Cache):
    """A cache for `length` tokens of each layer of a model."""

    def __init__(self, model: PreTrainedModel, length: int) -> None:
        layers = model.config.get_text_config().num_hidden_layers
        super().__init__(layers=[AllocatedLayer(length) for _ in range(layers)])


def count_cache_bytes(cache: Cache) -> int:
    """Count the bytes of keys and values that a cache holds."""
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values) if x is not None)


@contextmanager
def plain_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model attend causally in chunks without a mask.

    Transformers' SDPA takes a matrix of chunk × keys for a chunk after others, and no fused kernel. Here earlier keys
    are a rectangle and the chunk itself a triangle, each on the fastest kernel there is (cuDNN's since Hopper), merged
    by log-sum-exp.
    """
    AttentionInterface.register(PLAIN_IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(PLAIN_IMPLEMENTATION, lambda *args, **kwargs: None)
    before = model.config._attn_implementation
    model.set_attn_implementation(PLAIN_IMPLEMENTATION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **unused: Any
) -> tuple[Tensor, None]:
    earlier = key.shape[2] - query.shape[2]
    if query.shape[2] == 1 or earlier == 0:
        out = ise.attention(query, key, value, "plain", causal=earlier == 0, scale=scaling)
        return out.transpose(1, 2).contiguous(), None
    options: dict[str, Any] = {"scale": scaling, "return_lse": True}
    old, aux = ise.attention(query, key[:, :, :earlier], value[:, :, :earlier], "plain", causal=False, **options)
    own, own_aux = ise.attention(query, key[:, :, earlier:], value[:, :, earlier:], "plain", causal=True, **options)
    weight = torch.sigmoid(aux.lse - own_aux.lse)[..., None].to(own.dtype)  # of earlier keys
    return torch.lerp(own, old, weight).transpose(1, 2).contiguous(), None


class OutOfTimeError(Exception):
    """No time is left to read on."""


@dataclass
class Reading:
    """What reading a text gave: seconds of the model without and of the losses, and -ln p of every token but the first.

    `processor_seconds` are those of the model too, of all threads: on a CPU that is shared, the ones to compare. `last`
    is the hidden state of the last token, (1, size).
    """

    seconds: float = 0.0
    processor_seconds: float = 0.0
    loss_seconds: float = 0.0
    losses: list[Tensor] = field(default_factory=list)
    last: Tensor | None = None


@torch.inference_mode()
def read_in_chunks(
    model: PreTrainedModel,
    tokens: Tensor,
    cache: Cache,
    chunk: int,
    report: Callable[[int, Reading], None] = lambda read, so_far: None,
) -> Reading:
    """Read tokens (n,) chunk by chunk into a cache.

    Args:
        model: a causal model.
        tokens: the text.
        cache: an empty one.
        chunk: tokens of a forward pass.
        report: called after every chunk with the tokens read so far; it may raise `OutOfTimeError`.

    Returns:
        Times and losses. Logits are computed for some rows at a time, never for all.
    """
    decoder, reading = get_decoder(model), Reading()
    for first in range(0, len(tokens), chunk):
        part = tokens[first : first + chunk].to(model.device)
        start, processor_start = _now(model.device), time.process_time()
        hidden = decoder(input_ids=part[None], past_key_values=cache, use_cache=True).last_hidden_state[0]
        middle = _now(model.device)
        reading.processor_seconds += time.process_time() - processor_start
        targets = tokens[first + 1 : first + len(part) + 1].to(model.device)  # the last token has none
        if len(targets):
            reading.losses.append(losses_from_hidden(model, hidden[: len(targets)], targets).double().cpu())
        reading.seconds += middle - start
        reading.loss_seconds += _now(model.device) - middle
        reading.last = hidden[-1:].clone()
        del hidden
        report(first + len(part), reading)
    return reading


@torch.inference_mode()
def generate_greedily(model: PreTrainedModel, reading: Reading, cache: Cache, count: int) -> tuple[list[int], float]:
    """Continue a text that was read; returns the tokens and the seconds of one."""
    assert reading.last is not None
    head, decoder = model.get_output_embeddings(), get_decoder(model)
    hidden, tokens = reading.last, list[int]()
    start = _now(model.device)
    for _ in range(count):
        token = head(hidden).float().argmax(-1)
        tokens.append(int(token))
        hidden = decoder(input_ids=token[None], past_key_values=cache, use_cache=True).last_hidden_state[0]
    return tokens, (_now(model.device) - start) / max(1, count)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
