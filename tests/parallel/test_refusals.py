"""What sequences over several processes refuse, and that one process alone gives what the model gives."""

from __future__ import annotations

import pickle
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import isentrope as ise
from isentrope.hf.names import IMPLEMENTATION
from isentrope.parallel.heads import LocalHeads
from isentrope.parallel.split import Split, plan_exchange
from tests.fixtures.models import llama, tokens

IDS = tokens(1, 24)


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_processes_must_have_been_started():
    with pytest.raises(ValueError, match="start them with torchrun"):
        ise.ContextParallel()


def test_only_lost_connections_are_reported_as_such(one_process):
    processes = ise.ContextParallel().processes

    def fail(error):
        raise error

    for lost in (RuntimeError("[pair.cc:534] Connection closed by peer"), dist.DistBackendError("gone")):
        with pytest.raises(RuntimeError, match="process 0 of 1 lost the connection to another"):
            processes._run(lambda: fail(lost))  # noqa: B023
    for other in (RuntimeError("Split sizes doesn't match total dim 0 size"), torch.OutOfMemoryError("no memory")):
        with pytest.raises(type(other), match=str(other)):
            processes._run(lambda: fail(other))  # noqa: B023


def test_sharded_recipes_are_made_once(one_process):
    parallel, heads = ise.Ulysses(), LocalHeads(0, 2, 4)
    recipe, other = ise.Recipe.parse("alibi"), ise.Recipe.parse("ssmax:heads=4")
    assert parallel._shard(recipe, heads, 8) is parallel._shard(recipe, heads, 8)
    assert parallel._shard(other, heads, 8) is not parallel._shard(other, heads, 8)


def test_options(one_process):
    with pytest.raises(ValueError, match="layout: expected one of zigzag, contiguous, got 'spiral'"):
        ise.ContextParallel(layout="spiral")
    with pytest.raises(ValueError, match="exchange: expected one of auto, gather, ring, got 'fax'"):
        ise.ContextParallel(exchange="fax")


def test_batches(one_process):
    parallel = ise.ContextParallel()
    with pytest.raises(ValueError, match="at least 2 tokens, one for each chunk of 1 processes, got 1"):
        parallel.shard(tokens(1, 1))
    with pytest.raises(ValueError, match=r"labels: expected shape \(1, 24\) like input_ids, got \(1, 23\)"):
        parallel.shard(IDS, labels=IDS[:, 1:])
    with pytest.raises(ValueError, match="expected tokens or inputs_embeds"):
        parallel.shard()
    with pytest.raises(ValueError, match="padding on the left or right"):
        parallel.shard(IDS, attention_mask=torch.tensor([[1, 0] * 12]))


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [("rerope:window=4+retrieve:blocks=1,size=2,sinks=0,queries=2", "chooses among all keys"), ("adaptive", "entropy")],
)
def test_recipes_that_need_all_keys_at_once(recipe, reason, one_process):
    parallel = ise.ContextParallel(exchange="ring")
    model = ise.extend(llama(num_hidden_layers=1), recipe, parallel=parallel)
    with torch.no_grad(), pytest.raises(ValueError, match=f"'ring' is not possible, since .*{reason}.*use 'gather'"):
        model(**parallel.shard(IDS))


def test_a_cache_with_tokens(one_process):
    parallel = ise.ContextParallel()
    model = ise.extend(llama(num_hidden_layers=1), "rerope:window=8", parallel=parallel)
    with torch.no_grad():
        cache = model(IDS).past_key_values
        with pytest.raises(ValueError, match=r"expected 24 keys.*got 48; begin with an empty cache"):
            model(**parallel.shard(IDS), past_key_values=cache)


def test_compiled_graphs(one_process):
    parallel = ise.ContextParallel()
    model = ise.extend(llama(num_hidden_layers=1), "rerope:window=8", parallel=parallel)
    run = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(Exception, match="not supported in a compiled graph"):
        run(**parallel.shard(IDS))


def test_trainer_refuses_its_own_context_parallelism():
    config = SimpleNamespace(cp_enabled=True, cp_backend="torch")
    trainer = SimpleNamespace(accelerator=SimpleNamespace(parallelism_config=config))
    model = ise.extend(llama(num_hidden_layers=1), "rerope:window=8")
    with pytest.raises(ValueError, match="only with SDPA attention, you are using isentrope"):
        Trainer._prepare_context_parallel_inputs(trainer, model, {"input_ids": IDS})


def test_deepspeed_sequence_parallelism_is_refused(monkeypatch):
    """It puts a function in place of the one registered, which attends with some heads to all tokens."""
    recipe = "rerope:window=8"
    model, attend = ise.extend(llama(num_hidden_layers=1), recipe), ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION]

    def attend_with_half(module, query, key, value, mask, **options):
        return attend(module, query[:, :2], key[:, :1], value[:, :1], None, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, IMPLEMENTATION, attend_with_half)
    with pytest.raises(ValueError, match=r"extended with 4 heads, and got 2: .*pass parallel=isentrope.Ulysses"):
        model(IDS)


def test_heads_that_cannot_be_shared(one_process):
    parallel = ise.Ulysses()
    parallel.processes.size = 3
    with pytest.raises(ValueError, match="3 processes can share evenly, got 4 and 2; use ContextParallel"):
        parallel._check(torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 1, 8), ise.Recipe())
    parallel.processes.size = 4
    recipe = ise.Recipe.parse("rerope:window=8+retrieve:blocks=2,size=4,sinks=4,queries=4")
    with pytest.raises(ValueError, match="heads that would be in several of 4 processes"):
        parallel._check(torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 1, 8), recipe)


def test_masks_without_processes_are_refused(one_process):
    part = ise.ContextParallel().shard(IDS)
    with torch.no_grad(), pytest.raises(ValueError, match="attention_mask: expected None or 0 and 1"):
        ise.extend(llama(num_hidden_layers=1), "rerope:window=8")(**part)


@pytest.mark.parametrize("kind", ["ContextParallel", "Ulysses"])
def test_one_process_alone(kind, one_process):
    parallel = getattr(ise, kind)()
    model = ise.extend(llama(), "rerope:window=8+share:beta=0.5,reference=4", parallel=parallel)
    with torch.no_grad():
        expected = model(IDS, labels=IDS)
        actual = model(**parallel.shard(IDS, labels=IDS))
        assert torch.equal(deepcopy(model)(**parallel.shard(IDS)).logits, actual.logits)
    torch.testing.assert_close(parallel.gather(actual.logits), expected.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(parallel.sum(actual.loss), expected.loss, rtol=0, atol=1e-6)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(parallel)


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("length", [8, 13, 61])
def test_every_token_is_in_one_process(zigzag, length):
    split = Split(length, 4, zigzag)
    slots = [slot for rank in range(4) for part in split.chunks(rank) for slot in part]
    assert sorted(slots) == list(range(length))
    counts = [split.count(rank) for rank in range(4)]
    assert max(counts) - min(counts) <= 2


def test_a_window_fetches_from_neighbours_alone():
    split = Split(64, 4, False)
    wanted = tuple((range(max(0, 16 * rank - 7), 16 * rank + 16),) for rank in range(4))
    assert plan_exchange(split, wanted, 2).received == (0, 7, 16, 0)
    assert plan_exchange(split, wanted, 2).sent == (0, 0, 16, 7)
