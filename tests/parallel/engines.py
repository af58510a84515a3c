"""Programs around models that processes share sequences of: FSDP, torch's and accelerate's context parallelism,
Trainer, generation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments, default_data_collator

import isentrope as ise
from tests.fixtures.models import llama, tokens
from tests.parallel.decoding import TWO_BRANCHES, check_generation
from tests.parallel.models import LENGTH, difference, make_batch, run_alone
from tests.parallel.workers import TOLERANCE, start


def check_fsdp(folder):
    """FSDP averages gradients over processes: the loss is multiplied by their number."""
    from torch.distributed.fsdp import fully_shard

    batch, parallel = make_batch("left"), ise.ContextParallel()
    _, loss, gradients = run_alone(ise.extend(llama(), TWO_BRANCHES), batch)
    model = ise.extend(llama(), TWO_BRANCHES, parallel=parallel)
    mesh = init_device_mesh("cpu", (parallel.size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    result = model(**parallel.shard(**batch), use_cache=False)
    (result.loss * parallel.size).backward()
    assert difference(parallel.sum(result.loss), loss) < TOLERANCE
    for name, weight in model.named_parameters():
        assert difference(weight.grad.full_tensor(), gradients[name]) < TOLERANCE, name


def check_torch_context_parallel(folder):
    """The context manager that accelerate and Trainer use."""
    from torch.distributed.tensor.experimental import context_parallel

    ids = tokens(1, 48)
    positions = torch.arange(48)[None].contiguous()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallel = ise.ContextParallel(mesh)
    model = ise.extend(llama(), TWO_BRANCHES, parallel=parallel)
    with torch.no_grad():
        expected = model(ids).logits
        with context_parallel(mesh, buffers=[ids, positions], buffer_seq_dims=[1, 1]):
            actual = model(ids, position_ids=positions, use_cache=False).logits
            with pytest.raises(ValueError, match="expected position_ids 0, 1, 2 … spread over 2 processes"):
                model(ids, position_ids=positions + 1, use_cache=False)
    assert difference(parallel.gather(actual), expected) < TOLERANCE


def check_accelerate(folder):
    """`ParallelismConfig(cp_size=2)` outside Trainer: what `prepare` does to a model, and `maybe_context_parallel`."""
    config = ParallelismConfig(cp_size=2)
    mesh = config.build_device_mesh("cpu")
    # an Accelerator itself refuses context parallelism without GPUs; these two methods need no more of it
    accelerator = SimpleNamespace(parallelism_config=config, torch_device_mesh=mesh)
    ids, positions = tokens(1, 48), torch.arange(48)[None].contiguous()
    expected, _, gradients = run_alone(ise.extend(llama(), TWO_BRANCHES), {"input_ids": ids, "labels": ids})
    parallel = ise.ContextParallel(mesh["cp"])
    model, alone = ise.extend(llama(), TWO_BRANCHES, parallel=parallel), ise.extend(llama(), TWO_BRANCHES)
    Accelerator._prepare_cp(accelerator, model, alone)
    labels = F.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    with Accelerator.maybe_context_parallel(accelerator, [ids, positions, labels], [1, 1, 1]):
        logits = model(ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum") / 47
        loss.backward()
        with pytest.raises(ValueError, match=r"context parallel: .*pass parallel=isentrope.ContextParallel"):
            alone(ids, position_ids=positions, use_cache=False)
    assert difference(parallel.gather(logits.detach()), expected) < TOLERANCE
    parallel.sum_gradients(model)
    for name, weight in model.named_parameters():
        assert difference(weight.grad, gradients[name]) < TOLERANCE, name


def check_removed_mask(folder):
    """A mask that a hook removes is noticed, as accelerate's would."""

    def remove(module, args, kwargs):
        return args, kwargs | {"attention_mask": None}

    parallel = ise.ContextParallel()
    model = ise.extend(llama(), TWO_BRANCHES, parallel=parallel)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(remove, with_kwargs=True)
    with pytest.raises(ValueError, match="did not reach attention"):
        model(**parallel.shard(tokens(1, 48)))


class SameRows(Trainer):
    """Every process reads the same rows, of which its collator takes a part."""

    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(
            self.train_dataset, batch_size=self._train_batch_size, collate_fn=self.data_collator
        )


def train(folder, trainer, model, collator):
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in tokens(8, LENGTH)]
    arguments = TrainingArguments(
        folder, max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=0.01,
        optim="sgd", lr_scheduler_type="constant", report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        max_grad_norm=0,
    )  # fmt: skip
    trainer(model, arguments, train_dataset=rows, data_collator=collator).train()
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def check_trainer(folder):
    """Two steps, of two batches each, change weights as in one process."""
    parallel = ise.ContextParallel()
    model = ise.extend(llama(), TWO_BRANCHES, parallel=parallel)
    actual = train(f"{folder}/{parallel.rank}", SameRows, model, parallel.collate(default_data_collator))
    expected = llama()
    rows = tokens(8, LENGTH)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.01)
    ise.extend(expected, TWO_BRANCHES)
    for step in (rows[:4], rows[4:]):
        optimizer.zero_grad()
        expected(step, labels=step, use_cache=False).loss.backward()
        optimizer.step()
    for name, weight in expected.named_parameters():
        assert difference(actual[name], weight.detach()) < TOLERANCE, name


CHECKS = {
    "fsdp": check_fsdp,
    "torch": check_torch_context_parallel,
    "accelerate": check_accelerate,
    "mask": check_removed_mask,
    "generation": check_generation,
    "trainer": check_trainer,
}


def run_checks(rank, folder, size, names):
    start(rank, folder, size)
    for name in names:
        CHECKS[name](folder)
