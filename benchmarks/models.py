"""Whole models: decoding with an extended Llama, training and evaluating GAU-α."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from measure import Call, Job, Row, Sizes, captured, compared, gpu_times
from methods import branched, chunked, mapped, with_far_law
from torch import Tensor, nn
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticCache

import isentrope as ise
from isentrope.data.batches import MaskedBatches
from isentrope.data.prepared import Documents
from isentrope.evaluation.loading import load_on_device
from isentrope.models import GAUAlphaConfig, GAUAlphaForMaskedLM
from isentrope.training.step import Stepper, prefetch

AWAY = 0.05  # what bf16 may make of the largest logit
ROOM = 128  # slots of a static cache beyond its contents: every step takes one
VOCABULARY, WARM = 12000, 8
# asked of training on a GPU, (batch, length): steps a second
RATES = {(128, 64): 200.0, (128, 512): 2.5e6 / (128 * 512)}


def decoding(size: Sizes, model: str | None = None, gguf_file: str | None = None) -> Iterator[Job]:
    """Extended models against the same model unextended: a prompt, then one token from a cache."""
    window, n = size.windows[-1], size.middle
    recipes = {
        f"ReRoPE {window} + InfoScale": f"rerope:window={window}+infoscale",
        "InfoScale": "infoscale",
        f"SelfExtend {window}/8 + InfoScale": f"selfextend:window={window},group=8+infoscale",
    }
    make = partial(_models, size, model, gguf_file)
    ways: list[tuple[str, Callable[..., Row]]] = [("eager", _eager)]
    if size.device == "cuda":
        ways.append(("graph", _captured))
    for name, recipe in recipes.items():
        yield Job("decoding", f"{name}, prompt", n, partial(_prompt, size, make, recipe, n))
        for batch in size.batches:
            for how, work in ways:
                label = f"{name}, batch {batch}, {how}"
                yield Job("decoding", label, n, partial(work, size, make, recipe, batch, n))
    recipe = f"rerope:window={window}+retrieve"  # no graph takes it
    for batch in size.batches:
        work = partial(_eager, size, make, recipe, batch, n)
        yield Job("decoding", f"ReRoPE {window} + retrieve, batch {batch}, eager", n, work)
    for method in (*mapped(window), *chunked(window)):
        yield Job("decoding", f"{method.name}, prompt", n, partial(_prompt, size, make, method.recipe, n))
        label, (how, work) = f"{method.name}, batch {size.batches[0]}", ways[-1]
        yield Job("decoding", f"{label}, {how}", n, partial(work, size, make, method.recipe, size.batches[0], n))
    if size.device == "cuda":
        method = branched(window)[0]
        changed = with_far_law(method, size.train_length)
        for batch in size.batches:
            label = f"{changed.name}, batch {batch}, graph"
            work = partial(_captured, size, make, changed.recipe, batch, n, method.recipe)
            yield Job("decoding", label, n, work)
    _models.cache_clear()


@cache
def _models(size: Sizes, name: str | None, gguf_file: str | None) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model twice, so that the plain one and the extended one can take turns."""
    plain = load_on_device(name, "auto", "auto", gguf_file) if name else random_model(size)
    return plain.eval(), copy.deepcopy(plain).eval()


def random_model(size: Sizes) -> PreTrainedModel:
    """A Llama of SmolLM2-135M's shape."""
    torch.manual_seed(0)
    shape = {"hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}
    rope = {"rope_type": "default", "rope_theta": 100000.0}
    layers = {"num_hidden_layers": size.decoder_layers}
    config = LlamaConfig(**shape, **heads, **layers, rope_parameters=rope, tie_word_embeddings=True)
    return LlamaForCausalLM(config).to(size.device, size.dtype)


def _prompt(size: Sizes, make: Callable[[], Any], recipe: str, n: int) -> Row:
    plain, other = make()
    ids = torch.randint(10, plain.config.vocab_size, (1, n), device=plain.device)

    def run(model: PreTrainedModel) -> object:
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state

    with torch.inference_mode(), ise.extended(other, recipe):
        return compared(size, partial(run, other), partial(run, plain), "the model unextended")


def _eager(size: Sizes, make: Callable[[], Any], recipe: str, batch: int, n: int) -> Row:
    """The same token again and again: for keys that grow cuDNN makes a plan at every length, which takes the unextended
    model twice as long as all the rest. Bound by Python and launches."""
    plain, other = make()

    def again(model: PreTrainedModel) -> Call:
        cache = dynamic(model, batch, n)
        run = step(model, cache, batch)

        def one() -> object:
            out = run()
            cache.crop(-1)
            return out

        return one

    with torch.inference_mode(), ise.extended(other, recipe):
        return compared(size, again(other), again(plain), "the model unextended, eager", 1.1)


def _captured(size: Sizes, make: Callable[[], Any], recipe: str, batch: int, n: int, against: str | None = None) -> Row:
    """One step each as a CUDA graph, with caches of fixed size. Positions come from the caches' own counters, which
    live on the device, so a replay decodes the next token."""
    plain, other = make()
    base = "unextended" if against is None else f"under {against}"
    with torch.inference_mode(), ise.extended(other, recipe), ExitStack() as stack:
        if against is not None:
            stack.enter_context(ise.extended(plain, against))
        replays = [_replay(name, model, batch, n) for name, model in (("extended", other), (base, plain))]
        ms, base_ms = gpu_times(replays, 20, 3)
    return {"ms": ms, "baseline": f"the model {base}, graph", "baseline_ms": base_ms, "ratio": ms / base_ms,
            "target": 1.25 if against is None else 1.005}  # fmt: skip


def _replay(name: str, model: PreTrainedModel, batch: int, n: int) -> Call:
    """One step of a model as a graph, which has been found to say what the step says."""
    cache = static(model, batch, n)
    run = step(model, cache, batch)
    try:
        graph, out = captured(run)
    except Exception as error:
        raise RuntimeError(f"the {name} model is not captured: {error}") from error
    rewind(cache, n)
    graph.replay()
    replayed = out.clone()
    rewind(cache, n)
    expected = run()
    rewind(cache, n)
    away = float((replayed - expected).abs().max() / expected.abs().max())
    if not away < AWAY:
        raise RuntimeError(f"the {name} model's graph is {away:.1%} away from its step")

    def replay() -> object:
        graph.replay()
        return run  # holds the cache and the token, which a graph knows by address only

    return replay


def step(model: PreTrainedModel, cache: Any, batch: int) -> Callable[[], Tensor]:
    token = torch.full((batch, 1), 10, device=model.device)
    return lambda: model(input_ids=token, past_key_values=cache, use_cache=True).logits


def contents(model: PreTrainedModel, batch: int, n: int) -> tuple[Tensor, Tensor]:
    """Random keys and values of one layer."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (batch, config.num_key_value_heads, n, head_dim)
    key, value = (torch.randn(shape, device=model.device, dtype=model.dtype) for _ in range(2))
    return key, value


def dynamic(model: PreTrainedModel, batch: int, n: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    fill(cache, model, batch, n)
    return cache


def static(model: PreTrainedModel, batch: int, n: int) -> StaticCache:
    cache = StaticCache(config=model.config, max_cache_len=n + ROOM)
    fill(cache, model, batch, n)
    return cache


def fill(cache: Cache, model: PreTrainedModel, batch: int, n: int) -> None:
    """Fill a cache with random keys, as if the model had."""
    for layer in range(model.config.num_hidden_layers):
        cache.update(*contents(model, batch, n), layer)
    own = model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=True).past_key_values
    cache.isentrope_recipe = getattr(own, "isentrope_recipe", None)


def rewind(cache: StaticCache, n: int) -> None:
    for layer in cache.layers:
        layer.cumulative_length.fill_(n)


def gau(size: Sizes) -> Iterator[Job]:
    """GAU-α, six layers at the paper's sizes: one prediction a row, and training steps."""
    rows, length = size.evaluate
    yield Job("gau", f"forward {rows} × {length}", length, partial(_evaluated, size))
    for batch, tokens, steps in size.train:
        yield Job("gau", f"training {batch} × {tokens}", tokens, partial(_trained, size, batch, tokens, steps))


def network(size: Sizes, dropout: float) -> Any:
    torch.manual_seed(0)
    config = GAUAlphaConfig(
        vocab_size=VOCABULARY, num_hidden_layers=6, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    return GAUAlphaForMaskedLM(config).to(size.device)


def _evaluated(size: Sizes) -> Row:
    """Ours for one position a row (bf16 on a GPU) against eager fp32 with all logits; whether they predict the same."""
    rows, length = size.evaluate
    exact = network(size, 0.0).eval()
    narrow = copy.deepcopy(exact).to(size.dtype)
    ids = torch.randint(5, VOCABULARY, (rows, length), device=size.device)
    at = torch.full((rows, 1), length // 2, device=size.device)

    def ours() -> Tensor:
        return narrow(ids, at=at).logits

    def eager() -> Tensor:
        return exact(ids, backend="reference").logits

    with torch.inference_mode():
        row = compared(size, ours, eager, "eager fp32, all logits", 1 / 12)
        same = float((ours().argmax(-1).flatten() == eager()[:, length // 2].argmax(-1)).float().mean())
    note = f"{row['baseline_ms'] / row['ms']:.1f} × as fast; {same:.0%} of the predictions the same (random weights)"
    return row | {"same": same, "note": note}


def _trained(size: Sizes, batch: int, length: int, steps: int) -> Row:
    rate = trained(size, batch, length, steps)
    row: Row = {"ms": 1000 / rate, "steps_per_second": rate, "tokens_per_second": rate * batch * length}
    row["note"] = f"{rate:.1f} steps/s, {rate * batch * length / 1e6:.2f} M tokens/s"
    asked = RATES.get((batch, length))
    if asked is None:
        return row
    return row | {"baseline": f"{asked:.1f} steps/s", "baseline_ms": 1000 / asked, "ratio": asked / rate, "target": 1.0}


def trained(size: Sizes, batch: int, length: int, steps: int) -> float:
    """Optimiser steps a second of a whole stretch of steps, begun and ended with an empty queue; batches are drawn,
    masked and copied meanwhile, as in `isentrope train`."""
    torch._dynamo.reset()
    ids = np.random.default_rng(0).integers(5, VOCABULARY, 1 << 22, np.int32)
    count = len(ids) // 8192
    documents = Documents([str(i) for i in range(count)], np.full(count, 8192), np.arange(count) * 8192, ids)
    batches = MaskedBatches(documents, length, batch, 0, mask_token=4, replacement_tokens=np.arange(5, VOCABULARY))
    cuda = size.device == "cuda"
    model: nn.Module = network(size, 0.1).train()
    stepper = Stepper(model, Accelerator(), decay=0.01, clip=1.0, bf16=cuda, accumulate=1, compile=cuda)
    losses, begun = [], 0.0
    with prefetch(batches.__getitem__, 0, WARM + steps, pin=cuda) as stream:
        for done, drawn in enumerate(stream):
            if done == WARM:
                torch.cuda.synchronize() if cuda else None
                begun = time.perf_counter()
            losses.append(stepper(drawn, 1e-4))
    torch.cuda.synchronize() if cuda else None
    seconds = time.perf_counter() - begun
    if not torch.stack(losses).isfinite().all():
        raise AssertionError("a loss is not a number")
    return steps / seconds
