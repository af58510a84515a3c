"""New tokens after a prompt whose cache stays in parts: attention, logits and tokens are those of one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier, BrokenBarrierError, Lock

import pytest
import torch
from torch.nn import functional as F

import isentrope as ise
from isentrope.hf.mask import make_frames_mask
from isentrope.parallel.decoding import attend_to_shards
from isentrope.parallel.key_parts import Options
from isentrope.parallel.rows import ShardedOffset, read_rows
from isentrope.parallel.split import Split
from tests.contract.matrix import Setting
from tests.fixtures.families import FAMILIES
from tests.fixtures.models import llama, tokens
from tests.parallel.cases import list_matrix, takes_rows
from tests.parallel.workers import EXACT_TOLERANCE, TOLERANCE, arrange, start

MODELS = (
    "plain",
    "infoscale:train_length=16",
    "rerope:window=8",
    "rerope:window=8+logn:train_length=16,keys=near+power:train_length=16,gamma=0.3,keys=far+share:beta=0.5,reference=8",
    "selfextend:window=8,group=4",
    "sink:sinks=3,size=9",
    "alibi",
    "rerope:window=8+lambda:sinks=5,window=8",
    "dualchunk:chunk=12,local=3",
    "layers:0=rerope:window=8;1=window:size=9+logn:train_length=16",
    "ssmax",
    "adaptive",
    "ntk:factor=2,dynamic=True,original_length=20",
    "window:size=9",
    "yarn:factor=4,original_length=16",
    "lampe:window=8,train_length=24,reach=0.5,tail=0",
)
KINDS = (
    ("ContextParallel", {"exchange": "gather"}),
    ("Ulysses", {}),
    ("ContextParallel", {"layout": "contiguous"}),
)
TWO_BRANCHES = "rerope:window=8+infoscale:train_length=16,keys=near+share:beta=0.5,reference=8"


class ThreadGroup:
    """Threads in place of processes, one at a time: what `attend_to_shards` needs of them."""

    def __init__(self, size):
        self.size, self.barrier, self.parts, self.turn = size, Barrier(size), [None] * size, Lock()

    def run(self, work):
        """Return what each of them returns, or raise what one has raised: others then find a broken barrier."""

        def run_one(rank):
            try:
                with self.turn:
                    return work(Member(self, rank))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            runs = [pool.submit(run_one, rank) for rank in range(self.size)]
        errors = [run.exception() for run in runs if run.exception() is not None]
        errors.sort(key=lambda error: isinstance(error, BrokenBarrierError))
        if errors:
            raise errors[0]
        return [run.result() for run in runs]


class Member:
    def __init__(self, group, rank):
        self.group, self.rank, self.size, self.exchanges = group, rank, group.size, 0

    def gather(self, x):
        self.group.parts[self.rank], self.exchanges = x, self.exchanges + 1
        self.wait()
        whole = torch.stack(self.group.parts)
        self.wait()
        return whole

    def wait(self):
        self.group.turn.release()
        try:
            self.group.barrier.wait()
        finally:
            self.group.turn.acquire()


def list_decoding(every=1):
    """The matrix but for choices of far keys, in rows without padding and with padding on the left."""
    cases = [case for case in list_matrix("gather", every) if not case.retrieve]
    rows = ["left" if n % 2 and takes_rows(case.position, "left") else "" for n, case in enumerate(cases)]
    return [replace(case, rows=rows[n], causal=True) for n, case in enumerate(cases)]


def compare_decoding(case, size, new, dtype=torch.float64, backend="auto", head_dim=16, device="cpu"):
    """Attend with the last `new` queries in so many threads; return the largest relative error, and of what."""
    length, appended = case.length, case.length // 3
    setting = Setting(length, length, d=head_dim, dv=head_dim)
    torch.manual_seed(0)
    recipe = case.recipe(setting)
    for part in recipe.learned:
        part.to(device, dtype).requires_grad_(False)
    q, k, v = setting.tensors(dtype, device)
    q, (mask, _) = q[:, :, -new:], arrange(case.rows, 2, length)
    mask = None if mask is None else mask.to(device)
    padding = None if mask is None else ise.Padding(mask.sum(1), side="left")
    exact = (x.double() for x in (q, k, v)) if not recipe.learned else (q, k, v)
    given = {"causal": True, "mask": padding, "backend": "reference", "return_lse": True}
    expected, aux = ise.attention(*exact, recipe, **given)
    offset, options = ShardedOffset(appended - new), Options(recipe, True, None, None, backend, jumping=True)
    zigzag = case.layout == "zigzag"

    def attend(member):
        frames = make_frames_mask(2, new, length, length - new, offset, attention_mask=mask, device=device)
        rows = read_rows(frames, member, zigzag)
        assert rows.split == Split(length, size, zigzag, appended) and rows.cached
        slots = [slot for part in rows.chunks() for slot in part]
        result = attend_to_shards((q, k[:, :, slots], v[:, :, slots]), options, rows, member)
        assert member.exchanges == 1 + ("adaptive" in case.law)
        return result

    results = ThreadGroup(size).run(attend)
    for out, lse in results[1:]:  # or sampled tokens would differ
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
    pairs = {"output": (results[0][0], expected), "log-sum-exp": (results[0][1], aux.lse)}
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs.values())


def decode_model(recipe, rows, parallel, length, make=llama):
    """Read a prompt, then single tokens and a pair, beside one process; return the largest relative error."""
    options = {"allow_untrained": True}
    alone, model = ise.extend(make(), recipe, **options), ise.extend(make(), recipe, parallel=parallel, **options)
    ids, (mask, _) = tokens(2, length), arrange(rows, 2, length)
    mask = torch.ones_like(ids) if mask is None else mask
    logits, cache = parallel.prefill(model, ids, mask)
    result = alone(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0), logits_to_keep=1)
    pairs, past = [(logits, result.logits[:, -1])], result.past_key_values
    for step, count in enumerate((1, 1, 2, 1)):
        check_share(cache, parallel, length)
        mask, length = F.pad(mask, (0, count), value=1), length + count
        given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1)[:, -count:]}
        new = tokens(2, count, seed=step + 1)
        pairs.append(
            (model(new, past_key_values=cache, **given).logits, alone(new, past_key_values=past, **given).logits)
        )
    check_share(cache, parallel, length)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def check_share(cache, parallel, length):
    """A process holds about its share of all tokens, and no more memory than those take."""
    assert cache.get_seq_length() == length
    for layer in cache.layers:
        count = layer.keys.shape[2]
        assert abs(count - length / parallel.size) <= 2 + length / parallel.size / 8, (count, length)
        for x in (layer.keys, layer.values):
            assert x.untyped_storage().nbytes() == x.numel() * x.element_size()
        assert int(parallel.sum(torch.tensor(count))) == length


@torch.no_grad()
def run_decoding(rank, folder, size, recipes):
    start(rank, folder, size)
    failures = []
    for turn, recipe in enumerate(recipes):
        kind, options = KINDS[turn % len(KINDS)]
        rows, length = ("", "left", "left")[turn % 3], (53, 48, 61)[turn % 3]
        error = decode_model(recipe, rows, getattr(ise, kind)(**options), length)
        if not error < TOLERANCE:
            failures.append(f"{recipe} {rows} {kind} {options}: {error:.2e}")
    assert not failures, "\n".join([f"{len(failures)} of {len(recipes)}", *failures])


@torch.no_grad()
def run_others(rank, folder, size):
    """Windows and sinks of models' own; a law by which rounding of the entropy grows, in fp64 where nothing is left."""
    start(rank, folder, size)
    for name in ("gpt_oss", "mistral-windowed", "gemma3", "deepseek_v3"):
        assert decode_model(TWO_BRANCHES, "left", ise.ContextParallel(), 53, FAMILIES[name].model) < TOLERANCE, name
    law = "adaptive:coefficients=(0.4,1),threshold=0.2,keys=far+logn:train_length=8,keys=near"
    error = decode_model(f"rerope:window=8+{law}", "left", ise.ContextParallel(), 53, lambda: llama().double())
    assert error < EXACT_TOLERANCE


def check_generation(folder):
    """Tokens after a prompt that all processes have read are those of one process, greedy and sampled."""
    ids = tokens(2, 41)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    chosen = "rerope:window=8+retrieve:blocks=2,size=4,sinks=4,queries=4"
    sampled = {"do_sample": True, "temperature": 0.7}
    ways = (
        (TWO_BRANCHES, "ContextParallel", None, {"do_sample": False}),
        (TWO_BRANCHES, "ContextParallel", None, sampled),
        (TWO_BRANCHES, "Ulysses", None, {"do_sample": False}),
        ("window:size=9", "Ulysses", "each", {"do_sample": False}),
        (chosen, "ContextParallel", "each", {"do_sample": False}),
    )
    for recipe, kind, to, options in ways:
        parallel = getattr(ise, kind)()
        model = ise.extend(llama(), recipe, parallel=parallel)
        longer = torch.cat((ids, tokens(2, 1, seed=9)), 1)
        given = {"attention_mask": F.pad(mask, (0, 1), value=1), "max_new_tokens": 6, **options}
        torch.manual_seed(5)
        expected = model.generate(longer, **given)
        _, cache = parallel.prefill(model, ids, mask, to=to)
        torch.manual_seed(5)
        assert torch.equal(model.generate(longer, past_key_values=cache, **given), expected), (recipe, options)
    assert (parallel.prefill(model, ids, mask, to=1)[1] is None) == (parallel.rank != 1)
    model = ise.extend(llama(), TWO_BRANCHES, parallel=parallel)
    _, cache = parallel.prefill(model, ids)
    with torch.no_grad(), pytest.raises(ValueError, match="the same new tokens in all processes, got others"):
        model(tokens(2, 1, seed=parallel.rank), past_key_values=cache)
