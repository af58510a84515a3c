"""Extended models in several processes: logits, losses and gradients are those of one process."""

from __future__ import annotations

import torch

import isentrope as ise
from tests.fixtures.models import llama, tokens
from tests.parallel.workers import TOLERANCE, arrange, start

LENGTH = 53
RECIPES = (
    "pi:factor=4",
    "rerope:window=8",
    "rerope:window=8+infoscale:train_length=16,keys=near+logn:train_length=16,keys=far+share:beta=0.5,reference=8",
    "window:size=9",
    "ntk:factor=2,dynamic=True,original_length=20",
    "lampe:window=8,train_length=24,reach=0.5,tail=0",
    "dualchunk:chunk=12,local=3",
    "rerope:window=8+retrieve:blocks=2,size=4,sinks=4,queries=4",
    "ssmax",
    "adaptive",
)


def run_alone(model, batch):
    model.zero_grad()
    result = model(**batch, use_cache=False)
    result.loss.backward()
    return result.logits.detach(), result.loss.detach(), {name: w.grad.clone() for name, w in model.named_parameters()}


def run_together(model, batch, parallel):
    model.zero_grad()
    result = model(**parallel.shard(**batch), use_cache=False)
    result.loss.backward()
    parallel.sum_gradients(model)
    logits, loss = parallel.gather(result.logits.detach()), parallel.sum(result.loss)
    return logits, loss, {name: w.grad.clone() for name, w in model.named_parameters()}


def make_batch(rows):
    ids = tokens(2, LENGTH)
    mask, positions = arrange(rows, 2, LENGTH)
    labels = ids.clone() if mask is None else ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask, "position_ids": positions}
    return {name: x for name, x in batch.items() if x is not None}


def difference(a, b):
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-6)).item()


def compare_model(recipe, rows, make_parallel, **sizes):
    """Return the largest relative error of logits, loss and each weight's gradient, and which it was."""
    batch = make_batch(rows)
    mask = batch.get("attention_mask")
    real = torch.ones(2, LENGTH, 1) if mask is None else mask[..., None].float()
    options = {"allow_untrained": True}
    alone = run_alone(ise.extend(llama(**sizes), recipe, **options), batch)
    parallel = make_parallel()
    together = run_together(ise.extend(llama(**sizes), recipe, parallel=parallel, **options), batch, parallel)
    errors = {"logits": difference(together[0] * real, alone[0] * real), "loss": difference(together[1], alone[1])}
    errors |= {name: difference(together[2][name], grad) for name, grad in alone[2].items()}
    return max((error, name) for name, error in errors.items())


def run_models(rank, folder, size, cases):
    start(rank, folder, size)
    failures = []
    for recipe, rows, kind, options in cases:
        error, name = compare_model(recipe, rows, lambda kind=kind, options=options: getattr(ise, kind)(**options))
        if not error < TOLERANCE:
            failures.append(f"{recipe} {rows} {kind} {options}: {name} {error:.2e}")
    assert not failures, "\n".join([f"{len(failures)} of {len(cases)}", *failures])


KINDS = (("ContextParallel", {"exchange": "gather"}), ("ContextParallel", {"exchange": "ring"}), ("Ulysses", {}))


def list_models(size, every=1):
    """Recipes with kinds of rows and of parallelism in turn; `every` leaves one in so many."""
    cases = []
    for turn, (recipe, kind) in enumerate((recipe, kind) for recipe in RECIPES for kind in KINDS):
        if turn % every == turn // every % every:
            no_ring = "retrieve" in recipe or "adaptive" in recipe
            name, options = kind
            if name == "Ulysses" and "retrieve" in recipe and size > 2:  # the model has two key heads
                name, options = KINDS[0]
            options = {"exchange": "auto"} if no_ring and options.get("exchange") == "ring" else options
            cases.append((recipe, ("", "left", "packed", "right")[turn % 4], name, options))
    return cases
