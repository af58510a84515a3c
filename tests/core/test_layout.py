"""Random layouts, against every pair of slots."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from isentrope.core.layout import MAX_SPANS, Layout, Rows
from tests.fixtures.recipes import CPU, examples
from tests.fixtures.regions import N, layers, regions


@st.composite
def layouts(draw):
    """A random layout, and for each row its frame and position by slot, worked out one slot at a time."""
    keys = draw(st.integers(1, N))
    queries = draw(st.sampled_from([keys, draw(st.integers(1, keys)), draw(st.integers(1, N))]))
    batch = draw(st.integers(1, 2))
    lengths = draw(st.none() | st.lists(st.integers(0, keys), min_size=batch, max_size=batch))
    left = draw(st.booleans()) and lengths is not None
    rows = batch if draw(st.booleans()) else 1
    documents = draw(
        st.none() | st.lists(st.lists(st.integers(0, 2), min_size=keys, max_size=keys), min_size=rows, max_size=rows)
    )
    frames, aligned = [], []
    for row in range(batch):
        count = keys if lengths is None else lengths[row]
        low, high = (keys - count, keys) if left else (0, count)
        of_slots = []
        for slot in range(keys):
            a, b = slot, slot
            if documents is None:
                a, b = 0, keys
            else:
                ids = documents[row % rows]
                while a > 0 and ids[a - 1] == ids[slot]:
                    a -= 1
                while b < keys and ids[b] == ids[slot]:
                    b += 1
            of_slots.append((max(a, low), min(b, high)))
        frames.append(of_slots)
        last = count if queries != keys and lengths is not None and not left else keys
        aligned.append([last - queries + q for q in range(queries)])
    position_ids, positions = None, None
    if draw(st.booleans()):
        positions = []
        for row in range(batch):
            steps = draw(st.lists(st.integers(0, 3), min_size=keys, max_size=keys))
            ids, at = [], 0
            for slot in range(keys):
                fresh = slot and frames[row][slot][0] != frames[row][slot - 1][0]
                at = steps[slot] if fresh else at + steps[slot]
                ids.append(at)
            positions.append(ids)
        given_queries = [
            draw(st.lists(st.integers(0, 2 * N), min_size=queries, max_size=queries)) for _ in range(batch)
        ]
        position_ids = (torch.tensor(given_queries), torch.tensor(positions))
    rows = Rows(lengths, left, None if documents is None else torch.tensor(documents))
    whole = lengths is None and documents is None and draw(st.booleans())
    layout = Layout(batch, queries, keys, CPU, None if whole else rows, position_ids=position_ids)
    frame, query, key = [], [], []
    for row in range(batch):
        at = [frames[row][min(max(slot, 0), keys - 1)] for slot in aligned[row]]
        frame.append(at)
        query.append([slot - low for slot, (low, _) in zip(aligned[row], at, strict=True)])
        key.append([slot - low for slot, (low, _) in enumerate(frames[row])])
    if position_ids is not None:
        query, key = given_queries, positions
    return layout, torch.tensor(frame), torch.tensor(query), torch.tensor(key)


@examples(60)
@given(layouts(), regions)
def test_layout_against_every_pair(case, region):
    layout, frame, query, key = case
    slots = torch.arange(layout.keys)
    framed = (slots >= frame[..., :1]) & (slots < frame[..., 1:])
    dense = framed & (layers(region, query[..., None], key[:, None]) > 0)
    batch = layout.batch

    low, high = layout.bounds(region)
    covered = (slots >= low[..., None]) & (slots < high[..., None])
    assert bool((covered.sum(2) <= 1).all()), "intervals of one query overlap"
    assert torch.equal(covered.any(2).expand(batch, -1, -1), dense)
    assert torch.equal(layout.count_keys("visible", region).expand(batch, -1), dense.sum(-1))
    assert torch.equal(layout.count_keys("position", region).expand(batch, -1), query + 1)
    held = (frame[..., 1] - frame[..., 0]).clamp_min(0)
    assert torch.equal(layout.count_keys("sequence", region).clamp_min(0).expand(batch, -1), held)

    simple = layout.simplify(region)
    low, high = layout.bounds(simple)
    covered = ((slots >= low[..., None]) & (slots < high[..., None])).any(2)
    assert torch.equal(covered.expand(batch, -1, -1), dense), "simplify changed what is visible"
    for first in range(layout.queries):
        for last in (first + 1, layout.queries):
            a, b = layout.key_range(region, first, last)
            assert 0 <= a <= b <= layout.keys
            reached = dense[:, first:last].flatten(0, 1).any(0).nonzero()
            assert len(reached) == 0 or (a <= reached.min() and reached.max() < b)
    if layout.queries == 1 and len(region.spans) <= MAX_SPANS:
        seen = layout.slots_of_one_query((region, region)).expand(batch, -1, -1)
        assert seen.shape[1:] == (2, 2 * MAX_SPANS) and seen.dtype == torch.int32
        assert torch.equal(seen[:, 0], seen[:, 1])
        low, high = seen[:, 0, ::2], seen[:, 0, 1::2]
        covered = (slots >= low[..., None]) & (slots < high[..., None])
        assert bool((low <= high).all()) and bool((covered.sum(1) <= 1).all())
        assert torch.equal(covered.any(1), dense[:, 0])
