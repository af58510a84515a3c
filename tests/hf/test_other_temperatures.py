"""Models under temperatures that depend on more than the number of keys, and laws of near keys in windowed layers."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache

import isentrope as ise
from tests.fixtures.families import FAMILIES
from tests.fixtures.models import extend, llama, tokens

RECIPES = (
    "adaptive",
    "rerope:window=16+adaptive:coefficients=(0.5,0.7)+share",
    "scaleinvariant",
    "selfextend:window=16,group=4+adaptive:keys=far+scaleinvariant:distance=4,keys=near",
)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cache_and_padding_change_nothing(recipe):
    model, ids = extend(llama(), recipe), tokens(2, 80)
    with torch.no_grad():
        whole = model(ids).logits
        cache, parts = DynamicCache(config=model.config), []
        for start, stop in ((0, 50), (50, 70), *((n, n + 1) for n in range(70, 80))):
            parts.append(model(ids[:, start:stop], past_key_values=cache, use_cache=True).logits)
        assert_close(torch.cat(parts, 1), whole, rtol=1e-3, atol=1e-3)
        mask = torch.ones(2, 90, dtype=torch.long)
        mask[0, :10] = mask[1, 80:] = 0
        shifted = torch.ones(2, 90, dtype=torch.long)
        shifted[0, 10:], shifted[1, :80] = ids[0], ids[1]
        rows = model(shifted, attention_mask=mask).logits
        assert_close(rows[0, 10:], whole[0], rtol=1e-3, atol=1e-3)
        assert_close(rows[1, :80], whole[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("recipe", [RECIPES[1], RECIPES[3]])
@pytest.mark.filterwarnings("ignore:.*was not trained with:UserWarning")
def test_saved_and_loaded(recipe, tmp_path):
    model, ids = extend(llama(), recipe), tokens(1, 80)
    model.save_pretrained(tmp_path)
    loaded = ise.load(tmp_path)
    assert str(ise.describe(loaded)) == str(ise.describe(model))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_described_in_words():
    page = str(ise.describe(extend(llama(), RECIPES[3])))
    assert "far τ     from the entropy of each query's attention, so that it depends on the text: adaptive:" in page
    assert "near τ    by distance, with a bias: 1→1.2 (-0.446)" in page
    described = ise.describe(extend(llama(), "rerope:window=16+adaptive")).layers[0]
    assert described.tau is None and described.far_tau is None and "τ at n" not in str(described)


def test_a_streaming_cache_has_no_distances_of_evicted_keys():
    model = extend(llama(), "sink:sinks=2,size=8+scaleinvariant")
    with pytest.raises(ValueError, match="StreamingCache: expected"):
        ise.StreamingCache(model)
    ise.StreamingCache(extend(llama(), "sink:sinks=2,size=8+adaptive"))


def test_models_are_trained_with_scale_invariant_attention():
    with pytest.raises(ValueError, match="was not trained with scaleinvariant"):
        ise.extend(llama(), "scaleinvariant")


# --- windowed layers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", ["logn:train_length=16,count=sequence", "adaptive", "ssmax:heads=4"])
@pytest.mark.filterwarnings("ignore:.*was not trained with:UserWarning", "ignore:.*was trained at 64:UserWarning")
def test_all_keys_of_a_windowed_layer_are_near(law):
    """Inside the window of the position method every key is near, in layers with a window of their own too."""
    ids = tokens(1, 80)
    results = []
    for text in (law, f"rerope:window=100+{law}{',' if ':' in law else ':'}keys=near"):
        model = ise.extend(FAMILIES["gemma3"].model(), text, allow_untrained=True)
        with torch.no_grad():
            results.append(model(ids).logits)
    assert_close(results[1], results[0], rtol=1e-3, atol=1e-3)
    plain = FAMILIES["gemma3"].model()
    with torch.no_grad():
        assert not torch.allclose(plain(ids).logits, results[0], atol=1e-2)


def test_describe_names_what_a_layer_leaves_out():
    model = ise.extend(
        FAMILIES["gemma3"].model(),
        "rerope:window=32+logn:train_length=64,keys=far+power:train_length=64,keys=near,count=sequence+share",
    )
    windowed, whole = ise.describe(model).layers
    assert windowed.other_laws == (
        ("left out", "logn:train_length=64,keys=far and share:reference=32, since all keys of this layer are near"),
    )
    assert whole.other_laws == () and windowed.tau == whole.tau != whole.far_tau
