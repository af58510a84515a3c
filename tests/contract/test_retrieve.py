"""Far keys by choice with laws, masks of rows and sizes of all kinds, against the dense reference; and its kernels."""

from __future__ import annotations

import copy
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import isentrope as ise
from isentrope import builder
from isentrope.backends import protocol
from isentrope.backends.blocks import gathered
from isentrope.backends.blocks.one_query import get_plan
from isentrope.block_selection import select_blocks
from isentrope.core import switches
from tests.contract.matrix import FAR_LAWS, FAR_POSITIONS, RETRIEVES, SCORES, SETTINGS, Setting, build, run
from tests.contract.test_fast import error, hopper, interprets
from tests.contract.test_matrix import check
from tests.fixtures.turns import in_turns

# DualChunk, and a tail of LaMPE, have far keys of several kinds, which are refused
ONE_WINDOW = tuple(text for text in FAR_POSITIONS if "chunk=" not in text and "tail=4" not in text)
CHOOSING = tuple(setting for setting in SETTINGS if setting.rows != "position_ids")
ONE_QUERY_TEXTS = (
    "rerope:window=24+retrieve:blocks=2,size=16,sinks=16,queries=8",
    "selfextend:window=20,group=4+logn:train_length=16+share:beta=1,reference=8+retrieve:blocks=2,size=24,sinks=5,queries=9",
    "rerope:window=24+cosine:alpha=16+ssmax:heads=6,bias=True+retrieve:blocks=3,size=10,sinks=0,queries=1,heads=all",
    "leakyrerope:window=24,leak=4+logn:train_length=16,keys=far+share:reference=8+retrieve:blocks=4,size=7,sinks=9,pool=1",
)  # fmt: skip
KERNEL_TEXTS = (
    "rerope:window=24+retrieve:blocks=2,size=16,sinks=16,queries=8",
    "selfextend:window=20,group=4+logn:train_length=16+share:beta=1,reference=8+retrieve:blocks=2,size=24,sinks=5,queries=9",
    "rerope:window=24+retrieve:blocks=2,size=10,sinks=16,queries=8,score=votes",
)  # fmt: skip


@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("choice", RETRIEVES)
@pytest.mark.parametrize("position", ONE_WINDOW)
def test_backends_agree_with_reference(position, choice, share, monkeypatch):
    """Scores and settings by turns; a third of the laws, another for the next position or choice."""
    monkeypatch.setattr(gathered, "MAX_TILE_ELEMENTS", {"cpu": 1 << 14})  # several tiles even at these sizes
    places = ONE_WINDOW.index(position), RETRIEVES.index(choice)
    turn = places[0] * 5 + places[1] * 3
    laws = ["", *(law for law in FAR_LAWS if "scaleinvariant" not in law and "sinks=" not in law)]  # refused there
    for law in laws[sum(places) % share :: share]:
        turn += 1
        setting = CHOOSING[turn % len(CHOOSING)]
        recipe = build(position, law, "", SCORES[turn % len(SCORES)], setting)
        recipe = replace(recipe, retrieve=ise.Recipe.parse(f"{position}+{choice}").retrieve)
        check(recipe, setting, True, ("blocks", "dense", "blocks")[turn % 3], run(recipe, setting, True, "reference"))


@pytest.mark.parametrize("setting", CHOOSING, ids=str)
def test_every_setting(setting):
    for choice in RETRIEVES[:2]:
        recipe = build("rerope:window=8", f"infoscale:train_length=16+{choice}", "", "", setting)
        check(recipe, setting, True, "blocks", run(recipe, setting, True, "reference"))


def check_kernel(text, setting, dtype, device):
    q, k, v = setting.tensors(dtype, device)
    recipe, given = ise.Recipe.parse(text), {"causal": True, "return_lse": True}
    for part in recipe.learned:
        part.to(device)
    with torch.no_grad():
        actual, aux = ise.attention(q, k, v, recipe, backend="blocks", **given)
        # the same blocks: products in half precision may rank two blocks the other way round
        exact = ise.attention(q, k, v, recipe, backend="reference", **given)
    bound = 5e-5 if dtype == torch.float32 else 2e-2
    assert error(actual, exact[0].double()) < bound and error(aux.lse, exact[1].lse.double()) < bound


@interprets
@pytest.mark.parametrize(
    ("text", "setting"),
    in_turns(KERNEL_TEXTS, (Setting(70, 110, batch=1, heads=6, d=32, dv=32), Setting(1, 150, d=32, dv=64))),
    ids=str,
)
def test_kernel_interpreted(text, setting, monkeypatch):
    monkeypatch.setattr(switches, "_on", switches.DEFAULTS - {switches.ONE_QUERY})  # which has tests of its own
    check_kernel(text, setting, torch.float32, "cpu")


@interprets
@pytest.mark.parametrize("text", ONE_QUERY_TEXTS)
def test_one_query_interpreted(text, monkeypatch):
    """One kernel that chooses and one that attends, several programs each, against the reference."""
    from isentrope.backends.blocks import one_query_kernel

    monkeypatch.setattr(switches, "_on", frozenset({switches.ONE_QUERY}))
    monkeypatch.setattr(one_query_kernel, "TARGET_PROGRAMS", 12)
    launched = Mock(wraps=one_query_kernel.OneQueryLaunch)
    monkeypatch.setattr(one_query_kernel, "OneQueryLaunch", launched)
    check_kernel(text, Setting(1, 175, heads=6, d=32, dv=64), torch.float32, "cpu")
    assert launched.call_count == 1


def check_shared_launches(device, monkeypatch):
    """Decoded tokens of a model: one launch for all layers, and what a call of each layer gives by itself."""
    from isentrope.backends.blocks import one_query_kernel

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, head_dim=32, vocab_size=32, num_hidden_layers=2, max_position_embeddings=32)
    recipe = "rerope:window=16+share:beta=0.75,reference=8+retrieve:blocks=2,size=8,sinks=8,queries=1"
    model, results = LlamaForCausalLM(config).eval().to(device), []
    ids, cache = torch.randint(32, (2, 52)).to(device), DynamicCache(config=config)
    launched = Mock(wraps=one_query_kernel.OneQueryLaunch)
    monkeypatch.setattr(one_query_kernel, "OneQueryLaunch", launched)
    with torch.no_grad():
        with ise.extended(model, recipe, backend="dense"):
            model(ids[:, :50], past_key_values=cache)
        for backend in ("dense", "auto"):
            mine = copy.deepcopy(cache)
            with ise.extended(model, recipe, backend=backend):
                results.append([model(ids[:, n : n + 1], past_key_values=mine).logits for n in (50, 51)])
    assert launched.call_count == 2  # one a token
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@interprets
def test_layers_share_a_launch_of_one_query_interpreted(monkeypatch):
    check_shared_launches("cpu", monkeypatch)


@pytest.mark.gpu
def test_layers_share_a_launch_of_one_query(monkeypatch):
    check_shared_launches("cuda", monkeypatch)


def test_calls_that_the_kernels_of_one_query_leave(monkeypatch):
    """More queries, votes, gradients, entropy and padding go another way, and are the same."""
    monkeypatch.setattr(protocol, "can_run_triton", lambda x: True)
    text = "rerope:window=24+retrieve:blocks=2,size=16,sinks=16,queries=8"
    q, k, v = Setting(1, 150, d=32, dv=32).tensors(torch.float32)
    inputs = builder.Inputs(q, k, v, causal=True)

    def plan(text, **changed):
        with torch.no_grad():
            return get_plan(builder.build_call(inputs._replace(**changed), ise.Recipe.parse(text).resolve()))

    assert plan(text).candidates == 6
    assert plan(f"{text},score=votes") is None and plan(f"{text}+adaptive") is None
    assert plan(text, q=torch.randn(2, 4, 3, 32)) is None
    assert plan(text, k=k.mT.contiguous().mT) is None
    assert plan(text, dropout=torch.relu) is None
    call = builder.build_call(inputs, ise.Recipe.parse(text).resolve())
    with torch.no_grad():
        assert get_plan(call) is not None
        with torch.autograd.forward_ad.dual_level():  # a tangent would be lost
            assert get_plan(call) is None
        assert get_plan(call) is not None
    assert get_plan(builder.build_call(inputs._replace(q=q.requires_grad_()), ise.Recipe.parse(text).resolve())) is None


@interprets
@pytest.mark.parametrize("votes", [1, 3, 4])
def test_votes_interpreted(votes):
    """The keys with the largest products among those before each query's end, and none where there are fewer."""
    from isentrope.backends.blocks.vote_kernel import launch

    q, k, _ = Setting(37, 150, d=32).tensors(torch.float32)
    first, ends = 6, torch.arange(37) * 3 + 7
    slots = launch(q, k, first, ends, votes).to(torch.int64)
    products = q @ k.repeat_interleave(2, 1).mT
    column = torch.arange(150)
    products = products.masked_fill((column < first) | (column >= ends[:, None]), -torch.inf)
    top = products.topk(votes, -1)
    expected = torch.where(top.values == -torch.inf, -1, top.indices)
    assert torch.equal(slots.sort(-1).values, expected.sort(-1).values)


@interprets
def test_scores_interpreted():
    from isentrope.backends.blocks.score_kernel import launch

    q, k, _ = Setting(37, 90, d=32).tensors(torch.float32)
    for size in (18, 15, 45):
        expected = (q @ k.repeat_interleave(2, 1).mT).unflatten(-1, (-1, size)).amax(-1)
        torch.testing.assert_close(launch(q, k, size), expected, rtol=0, atol=1e-4)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("d", [32, 64, 128, 256])
@pytest.mark.parametrize("text", KERNEL_TEXTS)
def test_kernel(text, d, dtype, monkeypatch):
    monkeypatch.setattr(switches, "_on", switches.DEFAULTS - {switches.ONE_QUERY})
    for setting in (
        Setting(333, 333, heads=6, d=d, dv=d),
        Setting(1, 700, heads=6, d=d, dv=d),
        Setting(77, 500, d=d, dv=d),
    ):
        check_kernel(text, setting, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("d", [32, 64, 128, 256])
@pytest.mark.parametrize("text", ONE_QUERY_TEXTS)
def test_one_query(text, d, dtype, monkeypatch):
    from isentrope.backends.blocks import one_query_kernel

    monkeypatch.setattr(switches, "_on", frozenset({switches.ONE_QUERY}))
    launched = Mock(wraps=one_query_kernel.OneQueryLaunch)
    monkeypatch.setattr(one_query_kernel, "OneQueryLaunch", launched)
    for setting in (Setting(1, 700, heads=6, d=d, dv=d), Setting(1, 5000, batch=1, heads=6, kv_heads=1, d=d, dv=d)):
        check_kernel(text, setting, dtype, "cuda")
    assert launched.call_count == 2


@pytest.mark.gpu
def test_one_query_against_long_rows(monkeypatch):
    """The default options: as many blocks as several programs choose from, and the same result every time."""
    monkeypatch.setattr(switches, "_on", frozenset({switches.ONE_QUERY}))
    for keys in (9000, 32768, 131073):
        q, k, v = Setting(1, keys, heads=9, kv_heads=3, d=64, dv=64).tensors(torch.bfloat16, "cuda")
        options = {"causal": True, "return_lse": True}
        with torch.no_grad():
            out, aux = ise.attention(q, k, v, "rerope:window=4096+retrieve", **options)
            again, _ = ise.attention(q, k, v, "rerope:window=4096+retrieve", **options)
            exact, exact_aux = ise.attention(q, k, v, "rerope:window=4096+retrieve", backend="dense", **options)
        assert aux.backend == "blocks" and torch.equal(out, again)
        assert error(out, exact.double()) < 2e-2 and error(aux.lse, exact_aux.lse.double()) < 2e-2


@pytest.mark.gpu
def test_gradients_on_a_gpu():
    setting = Setting(200, 200, heads=6, d=64, dv=64)
    results = []
    for backend in ("reference", "blocks"):
        q, k, v = (x.requires_grad_() for x in setting.tensors(torch.float32, "cuda"))
        out = ise.attention(q, k, v, KERNEL_TEXTS[0], causal=True, backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for ours, expected in zip(*results[::-1], strict=True):
        assert error(ours, expected.double()) < 1e-3


@pytest.mark.gpu
@hopper
def test_long_rows_on_a_gpu():
    """The default options at a length at which groups are scored in several chunks; memory stays linear."""
    text = "rerope:window=4096+retrieve"
    q, k, v = Setting(65536, 65536, batch=1, heads=9, kv_heads=3, d=64, dv=64).tensors(torch.bfloat16, "cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        out, aux = ise.attention(q, k, v, text, causal=True, return_lse=True)
    assert aux.backend == "blocks" and torch.cuda.max_memory_allocated() - before < 4 << 30
    index = select_blocks(q, k, text)
    assert index.shape == (1, 3, 2048, 16) and (index[0, :, -1] >= 1).all()
    # the last group alone chooses the same blocks, and is small enough for dense attention
    last = ise.attention(q[:, :, -32:], k, v, text, causal=True, backend="dense")
    assert error(out[:, :, -32:], last.double()) < 2e-2
