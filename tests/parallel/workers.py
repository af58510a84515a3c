"""Cases that several processes run together, each compared with one process."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

import isentrope as ise
from isentrope.parallel.key_parts import Options
from tests.contract.matrix import Setting, build

TOLERANCE = 1e-5  # of fp32, relative to the largest value
MAX_ROUNDING, EXACT_TOLERANCE = 5e-5, 1e-10  # where fp32 adds in another order; of the same in fp64


@dataclass(frozen=True)
class Case:
    """One call: the parts of a recipe, and how rows are laid out: "", "left", "right", "packed" or "jumping"."""

    position: str = ""
    law: str = ""
    mask: str = ""
    score: str = ""
    retrieve: str = ""
    rows: str = ""
    causal: bool = True
    length: int = 61
    layout: str = "zigzag"
    exchange: str = "gather"

    def recipe(self, setting):
        law = "+".join(part for part in (self.law, self.retrieve) if part)
        return build(self.position, law, self.mask, self.score, setting)


def arrange(rows, batch, length):
    """The attention mask and position ids of rows, None where there are none."""
    if rows in ("left", "right"):
        mask = torch.ones(batch, length, dtype=torch.int64)
        short = length // 3
        if rows == "left":
            mask[-1, :short] = 0
        else:
            mask[-1, -short:] = 0
        return mask, None
    if rows == "packed":
        edges = (0, length // 4, length // 2 + 3, length)
        parts = [torch.arange(b - a) for a, b in pairwise(edges)]
        return None, torch.cat(parts)[None].expand(batch, -1)
    if rows == "jumping":
        generator = torch.Generator().manual_seed(1)
        return torch.ones(batch, length, dtype=torch.int64), ise.PoSE(4 * length).sample(batch, length, generator)
    return None, None


def attend_alone(qkv, recipe, case, mask, positions):
    options = {}
    if mask is not None and not bool(mask.all()):
        options["mask"] = ise.Padding(mask.sum(1), side=case.rows)
    elif case.rows == "packed":
        options["mask"] = ise.Document((positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1))
    elif case.rows == "jumping":
        options["position_ids"] = positions
    return ise.attention(*qkv, recipe, causal=case.causal, **options)


def compare(case, make_parallel, dtype=torch.float32):
    """Run a case in this and the other processes; return the largest error of output and gradients, relative."""
    setting = Setting(case.length, case.length, d=16, dv=16)
    torch.manual_seed(0)  # some learned parts begin at random
    recipe = case.recipe(setting)
    for part in recipe.learned:
        part.to(dtype)
    qkv = [x.requires_grad_() for x in setting.tensors(dtype)]
    learned = [weight for part in recipe.learned for weight in part.parameters()]
    mask, positions = arrange(case.rows, 2, case.length)
    real = torch.ones(2, case.length) if mask is None else mask.float()
    weight = torch.randn(2, 4, case.length, 16, generator=torch.Generator().manual_seed(3)) * real[:, None, :, None]
    expected = attend_alone(qkv, recipe, case, mask, positions)
    wanted = [expected.detach() * real[:, None, :, None]]
    wanted += torch.autograd.grad((expected * weight).sum(), (*qkv, *learned))

    parallel = make_parallel(case)
    ids = torch.zeros(2, case.length, dtype=torch.int64)
    part = parallel.shard(ids, attention_mask=mask, position_ids=positions)["attention_mask"]
    slots = part[0, 0, :, 2].long()
    own = [x.detach()[:, :, slots].requires_grad_() for x in qkv]
    options = Options(recipe, case.causal, None, None, "auto", jumping=True)
    out, _ = parallel.attend(tuple(own), parallel.read(part, own[0], own[1]), options)
    grads = torch.autograd.grad((out * weight[:, :, slots]).sum(), (*own, *learned), allow_unused=True)
    actual = [parallel.gather(out.detach() * real[:, None, slots, None], 2)]
    actual += [parallel.gather(x, 2) for x in grads[:3]]
    actual += [parallel.sum(torch.zeros_like(w) if x is None else x) for x, w in zip(grads[3:], learned, strict=True)]
    errors = [(a - b).abs().max() / b.abs().max().clamp_min(1e-6) for a, b in zip(actual, wanted, strict=True)]
    largest = torch.stack(errors).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)  # so that all processes decide alike
    return largest.item()


def context_parallel(case):
    return ise.ContextParallel(layout=case.layout, exchange=case.exchange)


def ulysses(case):
    return ise.Ulysses(layout=case.layout)


def start(rank, folder, size):
    """Join the other processes, unless that is done."""
    if dist.is_initialized():
        return
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="localhost")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)


def run_cases(rank, folder, size, cases, make_parallel):
    start(rank, folder, size)
    failures = []
    for case in cases:
        try:
            error = compare(case, make_parallel)
        except Exception:
            failures.append(f"{case}: {traceback.format_exc(limit=-3)}")
            break  # the others may wait for this process
        # CLEX solves an equation with weights whose gradients are sums that nearly cancel: in fp64 nothing is left
        if case.position.startswith("clex") and TOLERANCE <= error < MAX_ROUNDING:
            exact = compare(case, make_parallel, torch.float64)
            error = 0.0 if exact < EXACT_TOLERANCE else exact
        if not error < TOLERANCE:
            failures.append(f"{case}: {error:.2e}")
    assert not failures, "\n".join([f"{len(failures)} of {len(cases)}", *failures[:20]])


def run_mixture(rank, folder, size, jobs):
    for worker, arguments in jobs:
        worker(rank, folder, size, *arguments)


def run_death(rank, folder, size):
    """The last process ends in the middle; the others write down what they raise."""
    start(rank, folder, size)
    case, parallel = Case("rerope:window=8"), ise.ContextParallel()
    compare(case, context_parallel)
    if rank == size - 1:
        os._exit(9)
    try:
        parallel.gather(torch.zeros(1, 8))
    except RuntimeError as error:
        Path(folder, "message").write_text(str(error))
        raise


def spawn(worker, tmp_path, size, *arguments):
    """Run processes forked from this one, whose imports take longer than what they compute.

    A process that uses a GPU cannot be forked: there they are forked from a fresh one.
    """
    assert not dist.is_initialized(), "forked processes would take this one's group for theirs"
    if torch.cuda.is_initialized():
        processes.spawn(fork, (worker, str(tmp_path), size, *arguments), nprocs=1)
    else:
        fork(0, worker, str(tmp_path), size, *arguments)


def fork(_, worker, folder, size, *arguments):
    processes.start_processes(worker, (folder, size, *arguments), nprocs=size, start_method="fork")
