"""New tokens after a prompt whose cache stays in parts; threads stand for processes where attention is compared."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import isentrope as ise
from isentrope.parallel.decoding import check_queries
from isentrope.parallel.split import Split
from tests.fixtures.models import llama, tokens
from tests.parallel.decoding import MODELS, ThreadGroup, compare_decoding, list_decoding, run_decoding, run_others
from tests.parallel.test_refusals import one_process  # noqa: F401
from tests.parallel.workers import EXACT_TOLERANCE, run_mixture, spawn

TWO_BRANCHES = "rerope:window=8+share:beta=0.5,reference=4"
IDS = tokens(1, 24)


def check_cases(cases):
    failures = []
    for turn, case in enumerate(cases):
        error = compare_decoding(case, 2 + turn % 3, (1, 1, 3)[turn % 3])
        if not error < EXACT_TOLERANCE:
            failures.append(f"{case}: {error:.2e}")
    assert not failures, "\n".join([f"{len(failures)} of {len(cases)}", *failures[:20]])


def test_recipes():
    check_cases(list_decoding(19))


@pytest.mark.slow
def test_every_recipe():
    check_cases(list_decoding(1))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # as in test_context_parallel.py
@pytest.mark.parametrize("size", [2, 4])
def test_every_model(size, tmp_path):
    spawn(run_mixture, tmp_path, size, ((run_decoding, (MODELS,)), (run_others, ())))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_recipes_on_a_gpu(dtype, tolerance):
    for turn, case in enumerate(list_decoding(19)):
        new = (1, 1, 3)[turn % 3]
        error = compare_decoding(case, 2 + turn % 3, new, dtype, head_dim=64, device="cuda")
        assert error < tolerance, case


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_parts_stay_few_and_equal(size, zigzag):
    prompt = 640
    split, before = Split(prompt, size, zigzag), [()] * size
    for length in (prompt, 700, 1000, 5000, 100_000):
        split = split.append(length - split.length)
        chunks = [split.chunks(rank) for rank in range(size)]
        slots = [slot for part in chunks for one in part for slot in one]
        assert sorted(slots) == list(range(length))
        for rank, parts in enumerate(chunks):  # what a process has, it keeps, and in the same order
            own = [slot for one in parts for slot in one]
            assert own[: len(before[rank])] == list(before[rank]) and len(parts) <= 60
            assert abs(len(own) - length / size) <= 2 + length / size / 8
            before[rank] = own


def test_what_cannot_be_decoded_in_parts(one_process):  # noqa: F811
    parallel = ise.ContextParallel()
    chosen = ise.extend(llama(), "rerope:window=4+retrieve:blocks=1,size=2,sinks=0,queries=2", parallel=parallel)
    with pytest.raises(ValueError, match=r"retrieve.* chooses among all keys.*pass to=0 .*or to='each'"):
        parallel.prefill(chosen, IDS)
    model = ise.extend(llama(num_hidden_layers=1), TWO_BRANCHES, parallel=parallel)
    with pytest.raises(ValueError, match="to: expected a rank below 1, 'each' or None, got 1"):
        parallel.prefill(model, IDS, to=1)
    _, cache = parallel.prefill(model, IDS)
    with pytest.raises(ValueError, match="without gradients"):
        model(IDS[:, :1], past_key_values=cache)
    _, cache = parallel.prefill(model, IDS)
    with torch.no_grad(), pytest.raises(ValueError, match="continue those of the cached keys"):
        model(IDS[:, :1], past_key_values=cache, position_ids=torch.tensor([[3]]))
    with torch.no_grad(), pytest.raises(ValueError, match="begin with an empty cache"):
        model(**parallel.shard(IDS), past_key_values=cache)
    with pytest.raises(ValueError, match="begins with a prompt; call prefill again"):
        cache.reset()


@pytest.mark.parametrize("bias", [0.0, 200.0])
def test_other_tokens_are_refused_and_rounding_is_not(bias):
    """Beside biases too, which are larger than all that tells tokens apart (Qwen 2)."""
    torch.manual_seed(0)
    same, other = torch.randn(2, 1, 4, 1, 64)
    for x in (same, other):
        x[..., 5] += bias
    rounded = same.bfloat16().float()

    def check(queries):
        ThreadGroup(2).run(lambda member: check_queries(queries[member.rank], member))

    check((same, rounded))
    with pytest.raises(ValueError, match="the same new tokens in all processes, got others"):
        check((same, other))


def test_a_mask_that_does_not_arrive(one_process):  # noqa: F811
    parallel = ise.ContextParallel()
    model = ise.extend(llama(num_hidden_layers=1), TWO_BRANCHES, parallel=parallel)
    _, cache = parallel.prefill(model, IDS)

    def remove(module, args, kwargs):
        return args, kwargs | {"attention_mask": None}

    model.model.layers[0].self_attn.register_forward_pre_hook(remove, with_kwargs=True)
    with torch.no_grad(), pytest.raises(ValueError, match="did not reach attention"):
        model(IDS[:, :1], past_key_values=cache)


def test_tokens_are_taken_back(one_process):  # noqa: F811
    parallel = ise.ContextParallel()
    model = ise.extend(llama(), TWO_BRANCHES, parallel=parallel)
    new = tokens(1, 5, seed=1)
    with torch.no_grad():
        _, cache = parallel.prefill(model, IDS)
        expected = model(new, past_key_values=cache).logits
        cache.crop(-3)
        actual = model(new[:, 2:], past_key_values=cache).logits
        with pytest.raises(ValueError, match="at most 5 tokens to remove, those after the prompt, got 6"):
            cache.crop(-6)
    torch.testing.assert_close(actual, expected[:, 2:], rtol=0, atol=1e-4)
    assert cache.get_seq_length() == 29


def check_one_process(device, tolerance):
    """Every way of exchange at world size one, forward, backward and decoding, against the model without any."""
    ids, new = tokens(2, 53).to(device), tokens(2, 1, seed=1).to(device)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    ways = [("ContextParallel", {"exchange": way, "layout": "contiguous"}) for way in ("gather", "ring")]
    for kind, options in (*ways, ("Ulysses", {})):
        parallel = getattr(ise, kind)(**options)
        model = ise.extend(llama(hidden_size=128).to(device), TWO_BRANCHES, parallel=parallel)
        expected = model(ids, attention_mask=mask, position_ids=positions, labels=ids, use_cache=False)
        expected.loss.backward()
        wanted = [weight.grad.clone() for weight in model.parameters()]
        model.zero_grad()
        actual = model(**parallel.shard(ids, ids, mask, positions), use_cache=False)
        actual.loss.backward()
        parallel.sum_gradients(model)
        pairs = [(parallel.gather(actual.logits.detach())[0], expected.logits[0]), (actual.loss, expected.loss)]
        pairs += [(weight.grad, grad) for weight, grad in zip(model.parameters(), wanted, strict=True)]
        longer = torch.cat((ids, new), 1)
        given = {"attention_mask": F.pad(mask, (0, 1), value=1), "do_sample": False, "max_new_tokens": 4}
        given |= {"return_dict_in_generate": True, "output_logits": True}
        whole = model.generate(longer, **given)
        for to in (None, "each", 0):
            result = model.generate(longer, past_key_values=parallel.prefill(model, ids, mask, to)[1], **given)
            assert torch.equal(result.sequences, whole.sequences), (kind, options, to)
            pairs.append((torch.stack(result.logits), torch.stack(whole.logits)))
        for a, b in pairs:
            assert a.device.type == device and (a - b).abs().max() <= tolerance * b.abs().max(), (kind, options)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64):
        x, processes = torch.arange(12, device=device).to(dtype).view(4, 3), parallel.processes
        received, wait = processes.exchange(x, [4], [4], wait=False)
        wait()
        for y in (received, processes.gather(x)[0], processes.sum(x), parallel.gather(x, 0)):
            assert torch.equal(y, x), dtype


def test_all_exchanges_in_one_process(one_process):  # noqa: F811
    check_one_process("cpu", 1e-5)


@pytest.mark.gpu
def test_all_exchanges_with_nccl(tmp_path):
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        check_one_process("cuda", 1e-4)
    finally:
        dist.destroy_process_group()
