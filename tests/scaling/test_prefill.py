"""The cost model in cases that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from isentrope.scaling.hardware import H200, LINKS, Device, Link, interpolate_rate, parse_link
from isentrope.scaling.prefill import Setup, gather_seconds, plan_exchange, predict, send_seconds
from isentrope.scaling.shape import SHAPES, ModelShape, read_shape, shape_from_config
from isentrope.scaling.visibility import Visibility, count_busiest, list_parts, read_visibility

DENSE, WINDOW = Visibility("dense"), Visibility("windowed", 16, 20)
CHOSEN = Visibility("retrieved", 16, 48, pool=4)
SMALL = ModelShape("small", layers=3, hidden=8, heads=4, kv_heads=2, head_dim=2, feed_forward=16, vocabulary=10)
# one operation a second everywhere, one byte a second on the link
UNIT = Device("unit", 1e9, 1.0, 0.0, ((1.0, 1.0),), ((1.0, 1.0),), 1.0, 1.0, "made up")
FLAT = Link("flat", 1 << 20, 1.0, 1.0, 0.0, 1.0, "made up")


def count_slowly(visibility, positions):
    return sum(i + 1 if visibility.budget is None else min(i + 1, visibility.budget) for i in positions)


@pytest.mark.parametrize("visibility", [DENSE, WINDOW, CHOSEN])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("tokens", "processes"), [(96, 4), (97, 3), (40, 1), (7, 4)])
def test_pairs_are_those_of_a_double_loop(visibility, layout, tokens, processes):
    spread = [[i for part in list_parts(tokens, processes, p, layout) for i in range(*part)] for p in range(processes)]
    assert sorted(i for positions in spread for i in positions) == list(range(tokens))
    pairs, far = count_busiest(visibility, tokens, processes, layout)
    assert pairs == max(count_slowly(visibility, positions) for positions in spread)
    near = visibility.window or tokens
    assert far == max(sum(max(0, i + 1 - near) for i in positions) for positions in spread)


def test_zigzag_balances_causal_work_and_contiguous_does_not():
    n, processes = 4096, 8
    share = n * (n + 1) / 2 / processes
    for process in range(processes):
        assert sum(DENSE.count_pairs(*part) for part in list_parts(n, processes, process, "zigzag")) == share
    assert count_busiest(DENSE, n, processes, "contiguous")[0] / share == pytest.approx(2 - 1 / processes, rel=1e-3)


@pytest.mark.parametrize(
    ("exchange", "visibility"), [("ring", DENSE), ("gather", CHOSEN), ("ulysses", DENSE), ("gather", WINDOW)]
)
def test_one_process_exchanges_nothing(exchange, visibility):
    cost = predict(SMALL, visibility, Setup(64, 1, exchange), UNIT, LINKS["ndr"])
    assert cost.exchange_seconds == cost.waiting_seconds == cost.layer_bytes == cost.buffer_bytes == 0
    assert cost.seconds == pytest.approx(cost.linear_seconds + cost.attention_seconds)


def test_compute_by_hand():
    cost = predict(SMALL, DENSE, Setup(64, 1, "ring"), UNIT, FLAT)
    weights = 8 * 2 * (4 + 2 + 2) + 4 * 2 * 8 + 3 * 8 * 16  # q, k, v; output; feed-forward
    assert SMALL.layer_weights == weights
    assert cost.linear_seconds == 3 * 2 * 64 * weights
    assert cost.attention_seconds == 3 * 4 * 2 * 4 * (64 * 65 / 2)
    chosen = predict(SMALL, CHOSEN, Setup(64, 1, "gather"), UNIT, FLAT)
    far = (64 - 16) * (64 - 16 + 1) / 2
    seen = 48 * 49 / 2 + 16 * 48
    assert chosen.attention_seconds == pytest.approx(3 * 4 * 2 * 4 * (seen + far / 8))


def test_bytes_by_hand():
    n, processes, m = 64, 4, 16
    kv = 2 * 2 * 2 * 2  # keys and values, two heads of two, two bytes
    for exchange in ("gather", "all-gather", "ring"):
        assert plan_exchange(SMALL, DENSE, Setup(n, processes, exchange), FLAT).received == 3 * m * kv
    own = m * 2 * (2 * 4 + 2 * 4) * 2  # key heads are repeated to one for each process
    assert plan_exchange(SMALL, DENSE, Setup(n, processes, "ulysses"), FLAT).received == own * 3 / 4
    assert plan_exchange(SMALL, WINDOW, Setup(n, processes, "gather", "contiguous"), FLAT).received == (15 + 4) * kv


def test_bytes_of_a_window_do_not_grow_with_the_text():
    setups = [Setup(n, 8, "gather", "contiguous") for n in (1 << 20, 10 << 20)]
    short, long = (
        predict(SHAPES["8b"], read_visibility("window:size=4096"), setup, H200, LINKS["ndr"]) for setup in setups
    )
    assert short.layer_bytes == long.layer_bytes > 0
    assert short.waiting_seconds == long.waiting_seconds
    dense = [predict(SHAPES["8b"], DENSE, replace(setup, exchange="ring"), H200, LINKS["ndr"]) for setup in setups]
    assert dense[1].layer_bytes == 10 * dense[0].layer_bytes


def test_ulysses_refuses_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="divide 4 query and 2 key heads, got 3; use ring or gather"):
        predict(SMALL, DENSE, Setup(64, 3, "ulysses"), UNIT, FLAT)
    with pytest.raises(ValueError, match="got 128"):
        predict(SHAPES["70b"], DENSE, Setup(1 << 20, 128, "ulysses"), H200, LINKS["ndr"])


def test_a_ring_waits_only_for_a_slow_link():
    setup, compute = (
        Setup(64, 4, "ring"),
        predict(SMALL, DENSE, Setup(64, 4, "ring"), UNIT, replace(FLAT, inside_bandwidth=1e9)),
    )
    assert compute.waiting_seconds == 0 and compute.exchange_seconds > 0
    slow = predict(SMALL, DENSE, setup, UNIT, replace(FLAT, inside_bandwidth=1e-3))
    step = compute.attention_seconds / 4
    assert slow.seconds == pytest.approx(slow.linear_seconds + step + slow.exchange_seconds)
    gathered = predict(SMALL, DENSE, Setup(64, 4, "gather"), UNIT, FLAT)
    assert gathered.waiting_seconds == gathered.exchange_seconds == 3 * 3 * 16 * SMALL.kv_bytes


def test_links_of_two_speeds():
    link = Link("two", 2, 100.0, 10.0, 0.5, 1.0, "made up")
    # inside a node: 100 bytes from one other
    assert gather_seconds(100, 2, link) == 100 / 100 + 0.5
    # two nodes: of 4 · 100 bytes a node lacks half, and takes it in over two adapters
    assert gather_seconds(300, 4, link) == 200 / 20 + 3 * 0.5
    # straight from each: 200 of 300 bytes over the process's own adapter
    assert send_seconds(300, 4, link) == 200 / 10 + 3 * 0.5
    assert send_seconds(100, 2, link) == gather_seconds(100, 2, link)
    assert gather_seconds(100, 1, link) == send_seconds(100, 1, link) == 0


def test_more_processes_are_faster_where_the_link_is_free():
    free = replace(LINKS["nvlink"], inside_bandwidth=1e30, between_bandwidth=1e30, latency=0.0)
    flat = replace(H200, dense_rates=H200.dense_rates[-1:])
    one, eight = (predict(SHAPES["8b"], DENSE, Setup(1 << 20, p, "ring"), flat, free) for p in (1, 8))
    assert one.seconds == pytest.approx(8 * eight.seconds, rel=1e-6)


def test_memory_by_hand():
    n, processes = 1 << 20, 8
    cost = predict(SHAPES["8b"], DENSE, Setup(n, processes, "gather"), H200, LINKS["ndr"])
    m = n // processes
    assert cost.weight_bytes == SHAPES["8b"].weights * 2 and not cost.sharded
    assert cost.cache_bytes == 32 * m * 4096
    assert cost.activation_bytes == m * (8 * 4096 + 2 * 14336) * 2
    assert cost.buffer_bytes == n * 4096
    assert cost.memory_bytes == sum((cost.weight_bytes, cost.cache_bytes, cost.activation_bytes, cost.buffer_bytes))
    ring = predict(SHAPES["8b"], DENSE, Setup(n, processes, "ring"), H200, LINKS["ndr"])
    assert ring.buffer_bytes == 2 * m * 4096 + m * 32 * 129 * 4
    window = predict(SHAPES["8b"], WINDOW, Setup(n, processes, "gather"), H200, LINKS["ndr"])
    assert window.cache_bytes == 32 * 20 * 4096
    large = predict(SHAPES["70b"], DENSE, Setup(n, processes, "ring"), H200, LINKS["ndr"])
    assert large.sharded and large.weight_bytes == SHAPES["70b"].weights / 4 + 4 * SHAPES["70b"].layer_weights


def test_sharded_weights_share_the_link():
    device = replace(UNIT, memory_bytes=1.0, linear_rate=1e12, dense_rates=((1.0, 1e12),))
    cost = predict(SMALL, DENSE, Setup(64, 4, "gather"), device, FLAT)
    weights = SMALL.layer_weights * 2 * 3 / 4
    assert cost.seconds == pytest.approx(3 * (3 * 16 * SMALL.kv_bytes + weights))


def test_processes_share_cores():
    assert UNIT.share_cores(1, 2) == UNIT.share_cores(2, 2) == UNIT
    shared = UNIT.share_cores(4, 2)
    assert shared.linear_rate == shared.choosing_rate == shared.dense_rates[0][1] == shared.window_rates[0][1] == 0.5


def test_rates_between_measurements():
    points = ((1.0, 10.0), (100.0, 1000.0), (1e4, 900.0))
    assert interpolate_rate(points, 10) == pytest.approx(100)
    assert interpolate_rate(points, 0.1) == 10 and interpolate_rate(points, 1e9) == 900
    assert interpolate_rate(points, 100) == 900  # no more than in the longest call


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("rerope:window=64", DENSE),
        ("yarn:factor=4+infoscale", DENSE),
        ("window:size=64", Visibility("windowed", 64, 64)),
        ("sink:sinks=4,size=60", Visibility("windowed", 60, 64)),
        ("rerope:window=64+lambda:sinks=5,window=64", Visibility("windowed", 64, 69)),
        (
            "rerope:window=64+retrieve:blocks=2,size=16,sinks=8,queries=4,pool=2",
            Visibility("retrieved", 64, 64 + 2 * 16 + 16 + 16 + 4 - 2, 2),
        ),
    ],
)  # fmt: skip
def test_recipes(recipe, expected):
    assert read_visibility(recipe) == expected


@pytest.mark.parametrize(
    ("recipe", "word"),
    [
        ("alibi", "alibi"),
        ("rerope:window=64+retrieve:score=votes", "votes"),
        ("layers:0=infoscale;1-=logn:train_length=8", "layer"),
    ],
)
def test_recipes_without_rates_are_refused(recipe, word):
    with pytest.raises(ValueError, match=word):
        read_visibility(recipe)


def test_shapes():
    assert [round(SHAPES[name].weights / 1e9, 1) for name in ("1b", "3b", "8b", "70b")] == [1.2, 3.2, 8.0, 70.6]
    assert read_shape("70B") is SHAPES["70b"]


@pytest.mark.parametrize(
    ("change", "word"), [({"num_local_experts": 8}, "experts"), ({"hidden_size": None}, "hidden_size")]
)
def test_configs_that_are_refused(change, word):
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 10}
    config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, **sizes)
    shape = shape_from_config("a", config)
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim) == (2, 64, 4, 2, 16)
    for key, value in change.items():
        setattr(config, key, value)
    with pytest.raises(ValueError, match=word):
        shape_from_config("a", config)


def test_setups_that_are_refused():
    for bad in ({"tokens": 0}, {"processes": 0}, {"exchange": "rings"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Setup(**{"tokens": 8, "processes": 2, "exchange": "ring"} | bad)
    for exchange, visibility in (("ring", CHOSEN), ("ring", WINDOW)):
        with pytest.raises(ValueError, match="exchange"):
            predict(SMALL, visibility, Setup(64, 2, exchange), UNIT, FLAT)
    with pytest.raises(ValueError, match="layout"):
        predict(SMALL, DENSE, Setup(64, 2, "ring", "striped"), UNIT, FLAT)
    with pytest.raises(ValueError, match="did you mean"):
        parse_link("nvlinks")
    assert parse_link("25").inside_bandwidth == 25e9
    assert all(link.source and link.efficiency <= 1 for link in LINKS.values())
