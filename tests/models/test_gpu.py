"""The compiled, captured training step against the plain one."""

from __future__ import annotations

from threading import Event, Thread

import pytest
import torch
from accelerate import Accelerator
from torch.testing import assert_close

import isentrope.models as models
from isentrope.training.step import Stepper

pytestmark = pytest.mark.gpu
RECIPES = ("rope", "cosine:alpha=128", "alibi", "pi:factor=4+cosine:alpha=16", "clex", "rerope:window=8+infoscale")
RECIPES += ("rerope:window=8+power:keys=far+share:beta=1",)


def trained(recipe, compiled, captured=True, steps=8):
    torch.manual_seed(0)
    config = models.GAUAlphaConfig(
        vocab_size=200, hidden_size=128, intermediate_size=256, attention_key_size=64, num_hidden_layers=3,
        recipe=recipe, max_position_embeddings=32,
    )  # fmt: skip
    model = models.GAUAlphaForMaskedLM(config).cuda().train()
    step = Stepper(model, Accelerator(), decay=0.01, clip=1.0, bf16=True, accumulate=2, compile=compiled)
    step.captures = captured
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        ids = torch.randint(5, 200, (16, 32), generator=generator)
        at = torch.rand(16, 32, generator=generator).argsort(1)[:, :5].contiguous()
        noise = torch.randint(0, 1 << 31, (16,), generator=generator, dtype=torch.int32)
        batch = {"input_ids": ids, "at": at, "labels": ids.gather(1, at), "noise": noise}
        losses.append(step({name: x.pin_memory() for name, x in batch.items()}, 1e-3))
    assert (step.graph is not None) == captured
    return torch.stack(losses), dict(model.named_parameters())


# CLEX is never compiled: it would take minutes
@pytest.mark.parametrize(
    ("recipe", "compiled"), [(x, how) for x in RECIPES for how in (False, True) if not (how and x == "clex")]
)
def test_the_captured_step_is_the_step(recipe, compiled):
    torch._dynamo.reset()
    (losses, weights), (expected, reference) = trained(recipe, compiled), trained(recipe, False, captured=False)
    assert losses.isfinite().all()
    assert_close(losses, expected, atol=0.05, rtol=0.02)
    for name, weight in weights.items():
        # eight steps of Adam move an entry by 8e-3 at most; bf16 decides the sign of small gradients
        assert (weight - reference[name]).abs().mean() < 2e-3, name


def test_other_threads_pin_memory_while_the_step_is_captured():
    """What `ahead` does; CUDA lets nobody allocate by default, and the capture fails."""
    closed, kept = Event(), []

    def pin():
        while not closed.wait(1e-3):
            kept.append(torch.empty(1 << 12).pin_memory())
        kept.append("ended well")

    thread = Thread(target=pin)
    thread.start()
    try:
        losses, _ = trained("rope", compiled=False)
    finally:
        closed.set()
        thread.join()
    assert kept[-1] == "ended well"
    assert losses.isfinite().all()
