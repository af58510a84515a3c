"""Models spread over processes: each has the heads that are its own, and what cannot be extended is refused in time."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import isentrope as ise
from isentrope.hf.layer import get_layer
from isentrope.parallel.heads import LocalHeads, shard_temperature
from tests.fixtures.models import llama, tokens

IDS = tokens(1, 24)
PER_HEAD = ise.Recipe(temperature=ise.Fitted((8, 64), [[1.0, 1.2], [1.0, 1.5], [1.0, 2.0], [1.0, 3.0]]))
EXPONENTS = (0.5, -1.0, 1.5, 0.0)
BRANCHES = ise.Recipe(None, ise.ReRoPE(8), ise.Power(8, EXPONENTS, keys="far"), None, ise.Share([EXPONENTS], 2))
BY_LAYER = ise.LayerRecipes({"0-": BRANCHES})
SSMAX = ise.Recipe(temperature=ise.SSMax(heads=4, bias=True))
SSMAX.temperature.slope.data = torch.tensor([0.1, 0.3, 0.2, 0.5])
UNTRAINED = pytest.mark.filterwarnings("ignore:.*was not trained with:UserWarning")


class Mesh:
    """One rank of a device mesh, as far as it is looked at."""

    mesh_dim_names = None

    def __init__(self, rank):
        self.rank = rank

    def get_local_rank(self):
        return self.rank

    def get_group(self):
        return None


def share(rank, size=2):
    """A Llama as one of `size` processes holds it: its heads, its part of what they give."""
    model = llama(num_hidden_layers=1)
    attention = model.model.layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        weight = getattr(attention, name).weight
        weight.data = weight.data.chunk(size, 1 if name == "o_proj" else 0)[rank].contiguous()
    model._tp_size, model._device_mesh = size, Mesh(rank)
    return model


def attended(model, recipe):
    """What the first layer's attention gives."""
    actual = []
    handle = model.model.layers[0].self_attn.register_forward_hook(lambda module, args, out: actual.append(out[0]))
    with torch.no_grad(), ise.extended(model, recipe, allow_untrained=True):
        actual.clear()  # of the passes that examine it
        model(IDS)
    handle.remove()
    return actual[0]


@UNTRAINED
@pytest.mark.parametrize(
    "recipe", ["alibi", PER_HEAD, BRANCHES, BY_LAYER, SSMAX], ids=["alibi", "fitted", "far", "layers", "ssmax"]
)
def test_tensor_parallel_heads_are_those_of_the_whole_model(recipe):
    whole = attended(llama(num_hidden_layers=1), recipe)
    parts = [attended(share(rank), recipe) for rank in range(2)]
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=0, atol=1e-5 * whole.abs().max().item())


def test_layers_share_the_recipe_with_a_table_of_heads():
    model = ise.extend(llama(), ise.Recipe(position=ise.ReRoPE(8), share=ise.Share(EXPONENTS, 2)))
    recipes = {id(get_layer(layer.self_attn).recipe) for layer in model.model.layers}
    assert len(model.model.layers) > len(recipes) == 1


def test_tensor_parallel_refusals_name_all_heads():
    with pytest.raises(ValueError, match=r"llama: has 4 attention heads.*has 2"):
        ise.extend(share(0), ise.Recipe(temperature=ise.Fitted((8, 64), [[1.0, 1.2]] * 2)))
    with pytest.raises(ValueError, match=r"llama: has 4 attention heads, share:beta=\(1,2,\),reference=56 has 2"):
        ise.extend(share(0), "rerope:window=8+share:beta=(1,2)")
    with pytest.raises(ValueError, match=r"tensor parallel: retrieve.*chooses with all 4 heads together"):
        ise.extend(share(0), "rerope:window=8+retrieve:heads=all")
    with pytest.raises(ValueError, match=r"tensor parallel: clex learns from all 4 heads together"):
        ise.extend(share(0), "clex")


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharding_before_extending_is_refused(one_process):
    from torch.distributed.fsdp import fully_shard

    model = llama()
    fully_shard(model, mesh=one_process)
    with pytest.raises(ValueError, match=r"llama: .*already sharded.*extend first, then shard"):
        ise.extend(model, "rerope:window=8")
    model = ise.extend(llama(), "rerope:window=8")
    with torch.no_grad():
        expected = model(IDS).logits
        assert torch.equal(fully_shard(model, mesh=one_process)(IDS).logits, expected)


IDLE = "rerope:window=1000"  # for the part of the text that is here: the whole may be longer
SPLIT = [(recipe, False) for recipe in ("rerope:window=8", IDLE, "infoscale:train_length=8", "window:size=8")]


@pytest.mark.filterwarnings("ignore")  # older versions of torch warn of themselves while they compile
@pytest.mark.parametrize(("recipe", "compiled"), [*SPLIT, ("infoscale:train_length=8", True)])
def test_context_parallel_is_refused(recipe, compiled, one_process):
    from torch.distributed.tensor.experimental import context_parallel

    model = ise.extend(llama(num_hidden_layers=1), recipe)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    with torch.no_grad():
        before = run(IDS).logits
        with context_parallel(one_process, buffers=[torch.zeros(1, 8)], buffer_seq_dims=[1]):
            with pytest.raises(Exception, match=r"context parallel: .*not supported yet") as caught:
                run(IDS)
            assert compiled or caught.type is ValueError
        assert torch.equal(run(IDS).logits, before)


def test_frequencies_alone_pass_context_parallel(one_process, monkeypatch):
    """PI and YaRN are the model's own attention at other frequencies, which torch splits as any other model's."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    model = ise.extend(llama(), "pi:factor=4")
    with torch.no_grad():
        expected = model(IDS).logits
        replaced = torch._C._nn.scaled_dot_product_attention

        def split(*args, **options):
            return replaced(*args, **options)

        split.__module__ = _attention.__name__
        monkeypatch.setattr(F, "scaled_dot_product_attention", split)
        assert torch.equal(model(IDS).logits, expected)


def in_process(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    whole, part = (AutoModelForCausalLM.from_pretrained(folder, **options) for options in ({}, {"tp_plan": "auto"}))
    for recipe in ("alibi", PER_HEAD, BRANCHES, "rerope:window=8"):
        with torch.no_grad(), ise.extended(whole, recipe, allow_untrained=True) as model:
            expected = model(IDS).logits
        with torch.no_grad(), ise.extended(part, recipe, allow_untrained=True) as model:
            torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=1e-4)
    _check_ssmax(folder, whole, part)
    _check_one_slope(rank)
    dist.destroy_process_group()


def _check_ssmax(folder, whole, part):
    """Every process has and learns the slopes of all heads, as one process does."""
    results = []
    for model in (whole, part):
        ise.extend(model, SSMAX, allow_untrained=True)
        output = model(IDS, labels=IDS)
        output.loss.backward()
        laws = [get_layer(layer.self_attn).temperature for layer in model.model.layers]
        results.append((output.logits.detach(), *(x.grad for law in laws for x in law.parameters())))
    assert len(results[0]) == 1 + 2 * len(whole.model.layers)
    for one, other in zip(*results, strict=True):
        assert one.shape == other.shape and one.abs().sum() > 0
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4 * one.abs().max().item())
    part.save_pretrained(f"{folder}/trained")  # written by the first process
    dist.barrier()
    saved = ise.load(f"{folder}/trained")
    assert torch.equal(get_layer(saved.model.layers[0].self_attn).temperature.slope, SSMAX.temperature.slope)


def _check_one_slope(rank):
    """A slope for all heads learns from those of every process."""
    law = ise.SSMax(1, 64)
    sharded = shard_temperature(law, LocalHeads(2 * rank, 2, 4, dist.group.WORLD), 16)
    n = torch.tensor([[[100, 200]]])
    (sharded.scale(n, 16) * (1 + rank)).sum().backward()
    torch.testing.assert_close(law.slope.grad, 3 * torch.log(n.double()).sum().float()[None])


@UNTRAINED
@pytest.mark.slow
def test_tensor_parallel_in_two_processes(tmp_path):
    llama(num_hidden_layers=1).save_pretrained(tmp_path)  # tables of BRANCHES have one layer
    processes.spawn(in_process, (str(tmp_path),), nprocs=2)
