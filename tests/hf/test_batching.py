"""The same logits whatever way a text reaches an extended model: chunks, padding, packing, positions."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.testing import assert_close
from transformers import StaticCache

import isentrope as ise
from isentrope.core.layout import Layout
from isentrope.hf import layer
from isentrope.hf.layout_cache import LayoutCache
from tests.fixtures.generation import (
    BY_LENGTH,
    EXACT,
    LENGTH,
    ROUNDED,
    SOME,
    STEADY,
    extended,
    in_chunks,
    one_layer,
    padded,
    rows_of,
    shortest,
    whole,
)
from tests.fixtures.models import TRAINED, llama, tokens
from tests.fixtures.turns import in_halves, in_turns

pytestmark = pytest.mark.filterwarnings("ignore:.*was not trained with:UserWarning")
shared = cache(extended)  # a model for each recipe, which no test here changes


@pytest.mark.parametrize("recipe", STEADY)
def test_prefill_is_chunked_prefill_is_token_by_token(recipe):
    model, ids = shared(recipe), tokens(2, LENGTH)
    expected = whole(model, ids)
    assert (expected - whole(llama().double(), ids)).abs().max() > 1e-2  # the recipe does something here
    first = shortest(recipe)
    # tokens one by one past the training length, 64, then chunks
    sizes = [40, 22, *[1] * 6, 2, 1, 39] if first == 40 else [70, *[1] * 6, 2, 1, 31]
    assert sum(sizes) == LENGTH
    assert_close(in_chunks(model, ids, sizes), expected, **EXACT)


@pytest.mark.parametrize("recipe", in_halves(STEADY, 0))
def test_from_the_first_token_on(recipe):
    model, ids = shared(recipe), tokens(1, 70)
    expected = whole(model, ids)
    for sizes in ([*[1] * 10, 11, *[1] * 13, 36], [7, 20, 3, 1, 36, 3]):
        assert_close(in_chunks(model, ids, sizes), expected, **ROUNDED)


@pytest.mark.parametrize("recipe", in_halves(STEADY + BY_LENGTH, 1))
def test_a_static_cache_gives_the_same(recipe):
    """Its keys run past the last token, and the rest of them must count for nothing."""
    model, ids = shared(recipe), tokens(2, 95)
    sizes = [shortest(recipe), 3, 86 - shortest(recipe), *[1] * 6]
    static = StaticCache(config=model.config, max_cache_len=LENGTH)
    assert_close(in_chunks(model, ids, sizes, static), in_chunks(model, ids, sizes), **EXACT)


def dynamic_ntk(length):
    """transformers' own."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    return one_layer(rope_parameters=rope).double()


def untrained_clex(length):
    """NTK scaling at a factor that goes up by steps: another base for every length."""
    stretch = (2 * -(-length // TRAINED) - 1) ** (8 / 6)
    return one_layer(rope_parameters={"rope_type": "default", "rope_theta": 10000.0 * stretch}).double()


def by_position(length):
    """For the last token its position says the same as the length of the row."""
    return extended("infoscale:count=position", one_layer())


def longrope(length):
    """transformers' own."""
    lists = {"long_factor": [1.0, 2.0, 3.0, 4.0], "short_factor": [1.0, 1.5, 1.0, 2.0]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, "attention_factor": 1.0} | lists
    rope["original_max_position_embeddings"] = TRAINED
    return one_layer(rope_parameters=rope).double()


ORACLES = {
    "ntk:factor=4,dynamic=true": dynamic_ntk,
    "clex": untrained_clex,
    "infoscale:count=sequence": by_position,
    "longrope:factors=(1,2,3,4),short=(1,1.5,1,2)": longrope,
}


@pytest.mark.parametrize(("recipe", "oracle"), ORACLES.items())
@pytest.mark.parametrize("static", [False, True])
def test_angles_that_follow_the_length_reach_cached_keys(recipe, oracle, static):
    """In one layer, whose keys know nothing of each other, every step must be as a new pass over all that there is."""
    model, ids, sizes = one_layer().double(), tokens(2, LENGTH), [20, 30, *[1] * 20, 20, *[1] * 20]
    ise.extend(model, recipe)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH) if static else None
    steps = in_chunks(model, ids, sizes, cache)
    for end in torch.tensor(sizes).cumsum(0).tolist()[1::9]:
        assert_close(steps[:, end - 1], whole(oracle(end), ids[:, :end])[:, -1], **ROUNDED)


# batches


@pytest.mark.parametrize(
    ("recipe", "side", "given"),
    in_turns(STEADY + BY_LENGTH, [("left", False), ("right", False), ("left", True), ("right", True)]),
)
def test_a_padded_batch_is_each_row_alone(recipe, side, given):
    model, rows = shared(recipe), rows_of(LENGTH, shortest(recipe), 97)
    ids, mask, positions = padded(rows, side)
    logits = whole(model, ids, attention_mask=mask, **({"position_ids": positions} if given else {}))
    for row, of_row, kept in zip(rows, logits, mask.bool(), strict=True):
        expected = whole(model, row[None])[0]
        assert_close(of_row[kept], expected, **(EXACT if given or side == "right" else ROUNDED))


@pytest.mark.parametrize("recipe", in_halves(STEADY + BY_LENGTH, 0))
def test_short_rows_in_a_long_batch(recipe):
    """Rows inside the window, a row of one token, and a batch that is short as a whole."""
    model = shared(recipe)
    for rows in (rows_of(100, 1, 20), rows_of(20, 3, 11)):
        for side in ("left", "right"):
            ids, mask, positions = padded(rows, side)
            logits = whole(model, ids, attention_mask=mask, position_ids=positions)
            assert logits.isfinite().all()
            for row, of_row, kept in zip(rows, logits, mask.bool(), strict=True):
                assert_close(of_row[kept], whole(model, row[None])[0], **ROUNDED)


@pytest.mark.parametrize(("recipe", "static", "given"), in_turns(STEADY + BY_LENGTH, [(False, True), (True, False)]))
def test_a_left_padded_batch_decodes_as_each_row_alone(recipe, static, given):
    model, rows, new = shared(recipe), rows_of(80, shortest(recipe), 76), 3
    ids, mask, positions = padded(rows, "left")
    width = ids.shape[1]
    more = tokens(3, new, seed=5)
    steps = torch.arange(1, new + 1)
    ids, mask = torch.cat((ids, more), 1), torch.cat((mask, torch.ones_like(more)), 1)
    positions = torch.cat((positions, positions[:, -1:] + steps), 1) if given else None
    cache = StaticCache(config=model.config, max_cache_len=width + new + 9) if static else None
    logits = in_chunks(model, ids, [width, *[1] * new], cache, mask, positions)
    for i, row in enumerate(rows):
        expected = in_chunks(model, torch.cat((row, more[i]))[None], [len(row), *[1] * new])
        assert_close(logits[i : i + 1, width - len(row) :], expected, **(EXACT if given else ROUNDED))


@pytest.mark.parametrize("recipe", STEADY + BY_LENGTH)
def test_packed_rows_are_separate_rows(recipe):
    model, rows = shared(recipe), rows_of(shortest(recipe) + 5, 90, shortest(recipe), 75)
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    packed = whole(model, torch.cat(rows)[None], position_ids=positions)[0]
    for row, logits in zip(rows, packed.split([len(row) for row in rows]), strict=True):
        assert_close(logits, whole(model, row[None])[0], **EXACT)


@pytest.mark.parametrize("recipe", SOME)
def test_batches_of_other_sizes_one_after_another(recipe):
    """Nothing kept from one call may leak into the next."""
    model, short, long = shared(recipe), tokens(2, 33), tokens(3, LENGTH, seed=1)
    expected = whole(model, short), whole(model, long)
    for _ in range(2):
        assert torch.equal(whole(model, short), expected[0])
        assert torch.equal(whole(model, long), expected[1])
    assert_close(whole(model, long[:1]), expected[1][:1], **EXACT)
    ids, mask, positions = padded([long[0], short[0]], "left")
    assert_close(whole(model, ids, attention_mask=mask, position_ids=positions)[0], expected[1][0], **EXACT)
    ids, mask, positions = padded([short[0, :20], long[0]], "left")
    assert_close(whole(model, ids, attention_mask=mask, position_ids=positions)[1], expected[1][0], **EXACT)


@pytest.mark.parametrize("recipe", SOME)
def test_position_ids_that_start_anywhere(recipe):
    """Distances are what counts."""
    model, ids = shared(recipe), tokens(1, LENGTH)
    shifted = whole(model, ids, position_ids=torch.arange(1000, 1000 + LENGTH)[None])
    assert_close(shifted, whole(model, ids), atol=2e-4, rtol=0)  # fp32 angles at 1000


@pytest.mark.parametrize("quiet", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("recipe", ["rerope:window=32", "selfextend:window=32,group=4", "sink:sinks=4,size=24"])
def test_position_ids_are_read_at_every_call(recipe, quiet):
    """The same tensor with other numbers in it is not the same positions."""
    model, ids = extended(recipe), tokens(1, 100)
    with quiet():
        positions, mask = torch.arange(100)[None], torch.ones_like(ids)
        for each in (model, model, extended(recipe)):  # another has not asked before
            actual = whole(each, ids, position_ids=positions, attention_mask=mask)
            assert_close(actual, whole(each, ids, position_ids=positions.clone(), attention_mask=mask), **EXACT)
            positions[:, 50:] += 40


@pytest.mark.parametrize("quiet", [torch.inference_mode, torch.no_grad])
def test_position_ids_are_read_once_a_pass(quiet, monkeypatch):
    """What a look costs, on a GPU a wait, is not for every layer to pay."""
    looks = []
    look = layer.apply_position_ids
    monkeypatch.setattr(layer, "apply_position_ids", lambda *given: looks.append(0) or look(*given))
    model, ids = extended("rerope:window=32"), tokens(1, 100)
    with quiet():
        for count in (1, 2):
            whole(model, ids, position_ids=torch.arange(100)[None])
            assert len(looks) == count
    assert not next(m for m in model.modules() if isinstance(m, layer.Layer)).layouts.entries  # nothing is held on to


def test_clear_caches_drops_the_layouts_of_a_pass():
    layouts, ids = LayoutCache(layer_count=2), tokens(1, 8)
    made = [layouts.get((0, "kind"), (), None, ids, lambda: Layout(1, 8, 8, ids.device)) for _ in range(2)]
    assert made[0] is made[1] and len(layouts.entries) == 1
    ise.clear_caches()
    assert not layouts.entries


def test_a_captured_pass_reuses_no_layout_of_a_capture_that_was_left():
    layouts, ids = LayoutCache(layer_count=3), tokens(1, 8)

    def get(index):
        return layouts.get((index, "kind"), (), None, ids, lambda: Layout(1, 8, 8, ids.device), captured=True)

    left = [get(0), get(1)]
    again = [get(0), get(1), get(2)]
    assert left[0] is left[1] and again[0] is again[1] is again[2] and left[0] is not again[0]
