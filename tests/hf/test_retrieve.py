"""Models whose far keys are chosen: prefill, chunks, generation, padding, saving."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import MistralConfig, MistralForCausalLM

import isentrope as ise
from isentrope.analysis.observe import observe_blocks
from tests.fixtures.generation import extended, greedy, in_chunks, padded, rows_of, whole
from tests.fixtures.models import llama, tokens

LENGTH = 48
TEXT = "rerope:window=8+retrieve:blocks=2,size=4,sinks=4,queries={queries}"


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


@pytest.mark.parametrize("score", ["representative", "votes"])
def test_chunks_and_decoding_agree_with_prefill(score):
    model = extended(TEXT.format(queries=1) + f",score={score}")
    ids = tokens(1, LENGTH)
    expected = whole(model, ids)
    for sizes in ([1] * LENGTH, [20, 7, 21], [40, *[1] * 8]):
        close(in_chunks(model, ids, sizes), expected)
    assert not torch.allclose(expected, whole(extended("rerope:window=8"), ids), atol=1e-3)


def test_short_rows_are_as_without():
    ids = tokens(2, 15)
    assert torch.equal(whole(extended(TEXT.format(queries=4)), ids), whole(extended("rerope:window=8"), ids))


def test_padded_rows_generate_as_alone():
    model = extended(TEXT.format(queries=8))
    rows = rows_of(LENGTH, 31)
    ids, mask, _ = padded(rows, "left")
    together = greedy(model, ids, new=6, attention_mask=mask)
    for row, own in zip(together, rows, strict=True):
        assert torch.equal(row[-6:], greedy(model, own[None], new=6)[0, -6:])


def test_description_and_saving(tmp_path):
    model = extended(TEXT.format(queries=8) + "+share:beta=0.5,reference=4")
    page = str(ise.describe(model))
    assert "retrieve  2 blocks of 4 far keys by representative, the first 4 keys and a window of 8" in page
    model.save_pretrained(tmp_path)
    loaded = ise.load(tmp_path)
    ids = tokens(1, LENGTH)
    assert torch.equal(whole(loaded, ids), whole(model, ids))
    assert str(ise.Recipe.from_dict(ise.Recipe.parse(TEXT.format(queries=8)).to_dict())) == TEXT.format(queries=8)


def test_chosen_blocks_can_be_observed():
    model = extended(TEXT.format(queries=8))
    layers = observe_blocks(model, tokens(2, LENGTH))
    assert len(layers) == 2
    for index in layers:
        assert index.shape == (2, 2, 6, 2)
        assert index[:, :, 0].eq(-1).all()  # nothing is far yet
        last = index[:, :, -1]  # its first query is 40, so that blocks of 4 from 1 to 7 are far
        assert (last >= 1).all() and (last <= 7).all() and (last[..., 0] < last[..., 1]).all()
    assert observe_blocks(extended(TEXT.format(queries=8)), tokens(1, 16)) == [None, None]


def test_gradients_reach_all_weights():
    model = ise.extend(llama(), TEXT.format(queries=4))
    model.train()
    ids = tokens(1, LENGTH)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_one_compiled_graph_is_refused():
    model = extended(TEXT.format(queries=4))
    compiled = torch.compile(lambda x: model(x).logits, backend="eager", fullgraph=True)
    reason = "Developer debug context: .*keys cannot be chosen in a compiled graph; compile without fullgraph=True"
    with torch.no_grad(), pytest.raises(Exception, match=reason):
        compiled(tokens(1, LENGTH))


@pytest.mark.slow  # torch traces every function down to the one that chooses keys
def test_compiled_in_several_graphs():
    model, ids = extended(TEXT.format(queries=4)), tokens(1, LENGTH)
    expected = whole(model, ids)
    graphs = CompileCounter()
    with torch.no_grad():
        close(torch.compile(lambda x: model(x).logits, backend=graphs)(ids), expected)
    assert graphs.frame_count > 1


def test_windows_of_the_model():
    config = MistralConfig(
        vocab_size=512, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, sliding_window=9,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"layer 0 has a window of its own.*raise the window of rerope:window=8 to"):
        ise.extend(model, TEXT.format(queries=4))
    ise.extend(model, TEXT.format(queries=4).replace("window=8", "window=9"))
    assert whole(model, tokens(1, LENGTH)).isfinite().all()
