"""Padding, packing and decoding give what separate calls give."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.testing import assert_close

import isentrope as ise
from isentrope import Recipe, attention
from tests.contract.matrix import takes
from tests.fixtures.recipes import (
    EXACT,
    SMALL_MASKS,
    SMALL_POSITIONS,
    SMALL_TEMPERATURES,
    TRAINABLE,
    TRAINED,
    examples,
    named,
    qkv,
    seeds,
)

COUNTS = ["visible", "sequence", "position"]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("position", SMALL_POSITIONS)
@examples(3)
@given(
    named(COUNTS),
    seeds,
    st.lists(st.integers(1, 20), min_size=2, max_size=2),
    st.booleans(),
    named(TRAINABLE),
    named(sorted(SMALL_MASKS)),
    named([1.0, 1e20]),
)
def test_padding_never_changes_real_rows(position, side, count, seed, lengths, causal, backend, mask, size):
    recipe = Recipe(None, SMALL_POSITIONS[position], ise.InfoScale(TRAINED, count=count), SMALL_MASKS[mask])
    q, k, v = qkv(seed)
    real = [slice(0, n) if side == "right" else slice(20 - n, 20) for n in lengths]
    for row, kept in enumerate(real):
        for x in (k, v):
            x[row] = torch.full_like(x[row], size).index_copy(1, torch.arange(20)[kept], x[row][:, kept])
    padding = {"lengths": lengths} if side == "right" else {"mask": ise.Padding(torch.tensor(lengths), "left")}
    out, aux = attention(
        q, k, v, recipe, causal=causal, backend=backend, return_lse=True, return_entropy=True, **padding
    )
    for row, kept in enumerate(real):
        alone, alone_aux = attention(
            *(x[row : row + 1, :, kept] for x in (q, k, v)),
            recipe,
            causal=causal,
            backend=backend,
            return_lse=True,
            return_entropy=True,
        )
        assert_close(out[row, :, kept], alone[0], **EXACT)
        assert_close(aux.lse[row, :, kept], alone_aux.lse[0], **EXACT)
        assert_close(aux.entropy[row, :, kept], alone_aux.entropy[0], **EXACT)


@st.composite
def packings(draw, keys=20):
    """Documents as (start, stop), and their ids: runs of equal numbers, which may come back later in the row."""
    cuts = sorted(draw(st.sets(st.integers(1, keys - 1), max_size=4)))
    spans = list(zip([0, *cuts], [*cuts, keys], strict=True))
    ids = [n % 3 if draw(st.booleans()) else n + 3 for n in range(len(spans))]
    return spans, torch.tensor([i for i, (a, b) in zip(ids, spans, strict=True) for _ in range(a, b)])


@pytest.mark.parametrize("position", SMALL_POSITIONS)
@examples(4)
@given(named(COUNTS), seeds, st.data(), st.booleans(), named(TRAINABLE), named(sorted(SMALL_MASKS)), st.booleans())
def test_packed_documents_equal_separate_calls(position, count, seed, data, causal, backend, mask, padded):
    recipe = Recipe(None, SMALL_POSITIONS[position], ise.InfoScale(4, count=count), SMALL_MASKS[mask])
    q, k, v = qkv(seed)
    rows = [data.draw(packings()) for _ in range(2)]
    ids = torch.stack([ids for _, ids in rows])
    lengths = data.draw(st.lists(st.integers(0, 20), min_size=2, max_size=2)) if padded else None
    out = attention(q, k, v, recipe, causal=causal, mask=ise.Document(ids), lengths=lengths, backend=backend)
    for row, (spans, _) in enumerate(rows):
        for start, stop in spans:
            stop = min(stop, lengths[row]) if padded else stop
            if start < stop:
                alone = attention(
                    *(x[row : row + 1, :, start:stop] for x in (q, k, v)), recipe, causal=causal, backend=backend
                )
                assert_close(out[row, :, start:stop], alone[0], **EXACT)


# angles of dynamic NTK and CLEX, and n = the row's length, change while a row grows: no cache can follow them
BY_LENGTH = ("ntk-dynamic", "clex", "longrope", "leaky-reach", "selfextend-reach", "jetlong", "jetlong-reach", "lampe")
GROWING = {name: p for name, p in SMALL_POSITIONS.items() if name not in BY_LENGTH}


@pytest.mark.parametrize("position", GROWING)
@examples(3)
@given(
    seeds,
    named(sorted(SMALL_TEMPERATURES)),
    named(sorted(SMALL_MASKS)),
    named([None, ise.Cosine(8.0)]),
    named([1, 7]),
    named(TRAINABLE),
)
def test_decoding_equals_the_full_forward(position, seed, temperature, mask, score, step, backend):
    recipe = Recipe(score, GROWING[position], SMALL_TEMPERATURES[temperature], SMALL_MASKS[mask])
    assume(takes(backend, recipe))
    q, k, v = qkv(seed)
    full = attention(q, k, v, recipe, causal=True, backend=backend)
    prefill = 6
    for stop in (prefill, *range(prefill + step, 21, step)):
        start = 0 if stop == prefill else stop - step
        part = attention(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], recipe, causal=True, backend=backend)
        assert_close(part, full[:, :, start:stop], **EXACT)


@pytest.mark.parametrize("position", GROWING)
@examples(4)
@given(
    seeds,
    st.lists(st.integers(1, 20), min_size=3, max_size=3),
    named(["infoscale", "llama4", "none"]),
    named(sorted(SMALL_MASKS)),
    named([1, 3]),
    named(TRAINABLE),
)
def test_ragged_decoding_equals_the_full_forward(position, seed, lengths, temperature, mask, step, backend):
    """Rows of different lengths in one cache: the queries are each row's last tokens."""
    recipe = Recipe(None, GROWING[position], SMALL_TEMPERATURES[temperature], SMALL_MASKS[mask])
    q, k, v = qkv(seed, batch=3)
    last = torch.stack([q[row, :, [max(n - step + s, 0) for s in range(step)]] for row, n in enumerate(lengths)])
    out = attention(last, k, v, recipe, causal=True, lengths=lengths, backend=backend)
    for row, n in enumerate(lengths):
        full = attention(*(x[row : row + 1, :, :n] for x in (q, k, v)), recipe, causal=True, backend=backend)
        held = min(step, n)
        assert_close(out[row, :, step - held :], full[0, :, n - held :], **EXACT)
