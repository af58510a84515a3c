"""Far keys by choice, against plain loops over queries, keys and blocks."""

from __future__ import annotations

import pytest
import torch

import isentrope as ise
from isentrope.block_selection import select_blocks
from tests.fixtures.recipes import normal
from tests.fixtures.retrieve_oracle import Method, attend

BACKENDS = ("reference", "dense", "blocks")
CASES = (
    ("rerope:window=6", Method(6), {"blocks": 2, "size": 4, "sinks": 4, "queries": 4}),
    ("rerope:window=5", Method(5), {"blocks": 1, "size": 3, "sinks": 1, "queries": 7}),
    ("selfextend:window=6,group=3", Method(6, 3), {"blocks": 2, "size": 4, "sinks": 0, "queries": 3}),
    ("rerope:window=6", Method(6), {"blocks": 2, "size": 4, "sinks": 4, "queries": 6, "pool": 2}),
    ("rerope:window=6", Method(6), {"blocks": 2, "size": 4, "sinks": 4, "queries": 5, "pool": 1}),
    ("rerope:window=6", Method(6), {"blocks": 2, "size": 4, "sinks": 3, "queries": 5, "heads": "all"}),
    ("rerope:window=6", Method(6), {"blocks": 2, "size": 4, "sinks": 4, "queries": 4, "score": "votes", "votes": 2}),
    ("selfextend:window=4,group=2", Method(4, 2), {"blocks": 3, "size": 2, "sinks": 2, "queries": 1, "score": "votes"}),
)  # fmt: skip
LENGTH = 34


def text_of(position, options):
    return f"{position}+retrieve:" + ",".join(f"{key}={value}" for key, value in options.items())


NAMES = [text_of(position, options) for position, _, options in CASES]


def tensors(queries=LENGTH, keys=LENGTH, batch=1, heads=4, seed=0):
    q = 2 * normal(seed, batch, heads, queries, 8)
    return q, normal(seed + 1, batch, 2, keys, 8), normal(seed + 2, batch, 2, keys, 3)


@pytest.mark.parametrize(("position", "method", "options"), CASES, ids=NAMES)
def test_against_loops(position, method, options):
    q, k, v = tensors()
    out, lse, chosen = attend(q[0], k[0], v[0], method, options)
    text = text_of(position, options)
    for backend in BACKENDS:
        ours, aux = ise.attention(q, k, v, text, causal=True, backend=backend, return_lse=True)
        torch.testing.assert_close(ours[0], out, rtol=0, atol=1e-12)
        torch.testing.assert_close(aux.lse[0], lse, rtol=0, atol=1e-12)
        assert aux.backend == backend
    index = select_blocks(q, k, text)
    assert index.shape == (1, 2, -(-LENGTH // options["queries"]), options["blocks"])
    for (head, group), blocks in chosen.items():
        assert [b for b in index[0, head, group].tolist() if b >= 0] == blocks


@pytest.mark.parametrize(("position", "method", "options"), CASES[:5], ids=NAMES[:5])
def test_the_last_queries_alone(position, method, options):
    """A group has the queries of one call: those before are not part of it."""
    q, k, v = tensors(queries=9)
    out, lse, _ = attend(q[0], k[0], v[0], method, options, start=LENGTH - 9)
    for backend in BACKENDS:
        ours, aux = ise.attention(q, k, v, text_of(position, options), causal=True, backend=backend, return_lse=True)
        torch.testing.assert_close(ours[0], out, rtol=0, atol=1e-12)
        torch.testing.assert_close(aux.lse[0], lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("score", ["representative", "votes"])
def test_groups_of_one_query_agree_however_text_is_fed_in(score):
    text = f"leakyrerope:window=6,leak=4+retrieve:blocks=2,size=4,sinks=4,queries=1,score={score}"
    q, k, v = tensors(batch=2)
    whole = ise.attention(q, k, v, text, causal=True)
    for step in (1, 5):
        parts = []
        for first in range(0, LENGTH, step):
            last = min(first + step, LENGTH)
            parts.append(ise.attention(q[:, :, first:last], k[:, :, :last], v[:, :, :last], text, causal=True))
        torch.testing.assert_close(torch.cat(parts, 2), whole, rtol=0, atol=1e-13)


def test_rows_in_which_everything_is_chosen_are_as_without():
    q, k, v = tensors()
    for plain in ("rerope:window=6+share:beta=1,reference=2", "selfextend:window=6,group=3"):
        expected = ise.attention(q, k, v, plain, causal=True)
        for options in ("blocks=7,size=4,sinks=0,queries=4", "blocks=1,size=32", "blocks=1,size=4,sinks=22,queries=1"):
            assert torch.equal(ise.attention(q, k, v, f"{plain}+retrieve:{options}", causal=True), expected)


def test_a_needle_far_away_is_chosen_and_noise_is_not():
    q, k, _ = tensors(queries=1, keys=400)
    k = 0.1 * k
    k[:, :, 203] = 5 * q[:, ::2, 0]  # votes are for products without rotation
    index = select_blocks(q, k, "rerope:window=100+retrieve:blocks=3,size=8,sinks=8,score=votes,votes=1")
    assert (index == 203 // 8).any(-1).all()


@pytest.mark.parametrize("score", ["representative", "votes"])
def test_equal_scores_choose_the_first_blocks(score):
    q, k, _ = tensors(queries=1, keys=64)
    k = k[:, :, :1].expand(-1, -1, 64, -1)
    index = select_blocks(q, k, f"rerope:window=8+retrieve:blocks=2,size=4,sinks=4,score={score}")
    assert index.flatten(0, 2).tolist() == [[1, 2], [1, 2]]


@pytest.mark.parametrize("rows", ["lengths", "left", "documents"])
def test_padding_and_documents_are_rows_of_their_own(rows):
    text = "rerope:window=6+retrieve:blocks=2,size=4,sinks=4,queries=4+logn:train_length=8"
    q, k, v = (x.requires_grad_() for x in tensors(batch=2))
    lengths = [LENGTH, 25]
    arguments = {
        "lengths": {"lengths": lengths},
        "left": {"mask": ise.Padding(torch.tensor(lengths), side="left")},
        "documents": {"mask": ise.Document(torch.tensor([[0] * LENGTH, [0] * 25 + [1] * (LENGTH - 25)]))},
    }[rows]
    out, aux = ise.attention(q, k, v, text, causal=True, return_lse=True, return_entropy=True, **arguments)
    assert aux.backend == "blocks"
    spans = [(0, 0, LENGTH), (1, LENGTH - 25, LENGTH) if rows == "left" else (1, 0, 25)]
    spans += [(1, 25, LENGTH)] if rows == "documents" else []
    for row, first, last in spans:
        part = (slice(row, row + 1), slice(None), slice(first, last))
        alone, own = ise.attention(
            q[part], k[part], v[part], text, causal=True, backend="reference", return_lse=True, return_entropy=True
        )
        torch.testing.assert_close(out[part], alone, rtol=0, atol=1e-12)
        torch.testing.assert_close(aux.lse[part], own.lse, rtol=0, atol=1e-12)
        torch.testing.assert_close(aux.entropy[part], own.entropy, rtol=0, atol=1e-12)
        ours, expected = (
            torch.autograd.grad(x.square().sum(), (q, k, v), retain_graph=True) for x in (out[part], alone)
        )
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_laws_count_the_keys_that_are_seen():
    """With 2 blocks of 4, 4 first keys and a window of 6, the last of 34 queries sees 18 + what is between."""
    q, k, v = tensors(queries=1)
    text = "rerope:window=6+retrieve:blocks=2,size=4,sinks=4,queries=1"
    seen = 6 + 4 + 8 + (33 - 6 + 1) % 4
    _, plain = ise.attention(q, 0 * k, v, text, causal=True, return_lse=True)
    assert plain.lse.exp() == pytest.approx(seen)
    tau = ise.LogN(8).scale(torch.tensor([[[float(seen)]]]), 8)
    ours = ise.attention(q, k, v, text + "+logn:train_length=8", causal=True)
    torch.testing.assert_close(ours, ise.attention(tau.double() * q, k, v, text, causal=True), rtol=0, atol=1e-6)
    bias = -0.5 * torch.log(torch.tensor((seen - 6) / 3, dtype=torch.float64))
    _, shared = ise.attention(q, 0 * k, v, text + "+share:beta=0.5,reference=3", causal=True, return_lse=True)
    assert shared.lse.exp() == pytest.approx(float(6 + (seen - 6) * bias.exp()))


def test_refusals():
    q, k, v = tensors()
    text = "rerope:window=6+retrieve:blocks=2,size=4,sinks=4"
    with pytest.raises(ValueError, match="expected causal attention"):
        ise.attention(q, k, v, text)
    with pytest.raises(ValueError, match="needs a position method with near and far keys"):
        ise.Recipe.parse("rope+retrieve")
    with pytest.raises(ValueError, match=r"leave every key beyond one window .* got sink.*; leave out the mask"):
        ise.Recipe.parse(text + "+sink:sinks=2,size=20")
    with pytest.raises(ValueError, match="leave every key beyond one window"):
        ise.attention(q, k, v, text, causal=True, mask=ise.Window(20))
    with pytest.raises(ValueError, match="got dualchunk; use rerope"):
        ise.Recipe.parse("dualchunk+retrieve")
    with pytest.raises(ValueError, match=r"got lampe; use .* lampe with tail=0"):
        ise.Recipe.parse("lampe+retrieve")
    assert ise.Recipe.parse("lampe:tail=0+causal+retrieve").retrieve == ise.Retrieve()
    with pytest.raises(ValueError, match="it does not choose far keys; use 'auto', 'blocks' or 'dense'"):
        ise.attention(q, k, v, text, causal=True, backend="sdpa")
    with pytest.raises(ValueError, match="expected positions that count from 0"):
        ise.attention(q, k, v, text, causal=True, position_ids=2 * torch.arange(LENGTH))
    with pytest.raises(ValueError, match="expected one with retrieve"):
        select_blocks(q, k, "rerope:window=6")
    with pytest.raises(ValueError, match="expected one of representative, votes"):
        ise.Retrieve(score="mean")


def test_dropout_runs_dense():
    q, k, v = tensors()
    text = "rerope:window=6+retrieve:blocks=2,size=4,sinks=4"
    kept = ise.attention(q, k, v, text, causal=True, dropout=lambda weights: weights)
    torch.testing.assert_close(kept, ise.attention(q, k, v, text, causal=True), rtol=0, atol=1e-13)


@pytest.mark.parametrize("options", ["votes=8", "score=votes,pool=8"])
def test_options_without_effect_are_refused(options):
    with pytest.raises(ValueError, match="has no effect with score="):
        ise.Recipe.parse(f"rerope:window=6+retrieve:{options}")


@pytest.mark.parametrize("options", [options for _, _, options in CASES[:4]], ids=NAMES[:4])
def test_a_share_law_that_never_acts_is_left_out(options, monkeypatch):
    """Queries that choose may see fewer far keys than queries did in training: then there is no bias."""
    q, k, v = tensors()
    choice, position = ise.Retrieve(**options), torch.arange(300)[None]
    seen = (position - 5).clamp_min(0) - choice.count_hidden(position, window=6)
    assert choice.count_most_far() - choice.size < seen.max() <= choice.count_most_far()

    def attend_with(share=None):
        recipe = ise.Recipe(position=ise.ReRoPE(window=6), retrieve=choice, share=share)
        return ise.attention(q, k, v, recipe, causal=True, backend="blocks")

    plain = attend_with()
    assert not torch.equal(attend_with(ise.Share(reference=1)), plain)
    monkeypatch.setattr(ise.Share, "bias", lambda self, n_far: pytest.fail("it has none"))
    assert torch.equal(attend_with(ise.Share(reference=choice.count_most_far())), plain)
