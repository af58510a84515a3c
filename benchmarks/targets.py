"""Rows with targets: short inputs, decoding, entropy, backward, padded and packed rows, chunks, both directions.

A call that kernels behind switches (`isentrope/core/switches.py`) may speed up is measured without and with them, the
two and their baseline taking turns, as two rows: one run decides every switch. Both must give the same result. A row
whose name says nothing of switches has their defaults.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from calls import (
    CAUSAL,
    Case,
    Shape,
    count_pairs,
    equal_rows,
    make_call,
    make_shape,
    make_tensors,
    rope_sdpa,
    rope_sdpa_by_row,
    the_same,
)
from inputs import AWAY
from limits import find_limit
from measure import Call, Job, Row, Sizes, captured, rates, shorten, times
from methods import ALIBI, Method, branched, folded, windowed, with_far_law
from torch import Tensor

import isentrope as ise
from isentrope.core import switches
from isentrope.core.layout import Layout

BACKWARD_FLOPS = 3.5  # of forward and backward together, in forwards
MIN_BANDWIDTH_SHARE = 0.7  # of the card's, when one query reads a cache
MAX_CPU_RATIO = 1.2
CALLS_IN_GRAPH = 10  # of one decoded query, which takes less than launching it
BOTH = {"causal": False}


def targets(size: Sizes) -> Iterator[Job]:
    """Calls without switches first, then those with, which may fail."""
    for case in list_prompts(size):
        yield from _list_jobs(size, case)
    yield from _list_decoding(size)
    lists = list_switched, list_rows, list_bidirectional, list_retrieve, list_odd_rows
    for case in (case for each in lists for case in each(size)):
        yield from _list_jobs(size, case)


def cpu(size: Sizes) -> Iterator[Job]:
    """Two kinds of positions on a CPU against RoPE + SDPA: whole prompts, padded and packed rows."""
    if size.device != "cpu":
        return
    near, size = size.windows[-1] * 2, replace(size, seconds=3.0, least=7)  # on a CPU that others may share
    for n in (size.long, 2 * size.long):
        for method in branched(near)[0::2]:
            shape, pairs = make_shape(size, n), count_pairs(n, n)
            case = Case("cpu", method.name, method.recipe, shape, pairs, MAX_CPU_RATIO, partial(rope_sdpa, size))
            yield from _list_jobs(size, case)
            shape, name = Shape(1, 9, 3, n, n, 64), f"{method.name}, 9/3 heads of 64"  # of SmolLM2-135M
            case = replace(case, method=name, shape=shape)
            yield from _list_jobs(size, case)
    lengths = tuple(size.long * part // 4 for part in range(1, 5))
    rows = make_shape(size, lengths[-1])._replace(batch=len(lengths)), make_shape(size, sum(lengths))
    for how, shape in zip(("padded", "packed"), rows, strict=True):
        for method in branched(near)[0::2]:
            pairs, name = sum(count_pairs(n, n) for n in lengths), f"{method.name}, {how}"
            base = partial(rope_sdpa_by_row, size)
            case = Case("cpu", name, method.recipe, shape, pairs, MAX_CPU_RATIO, base, CAUSAL, lengths)
            yield from _list_jobs(size, case)


def list_prompts(size: Sizes) -> Iterator[Case]:
    """Prompts of whole rows."""
    base = partial(rope_sdpa, size)
    near, wide = size.windows
    two, wide_two = (branched(window)[0::2] for window in (near, wide))  # ReRoPE and SelfExtend
    planned = [(size.short // 4, method, 1.15) for method in two]
    planned.append((size.short // 4, folded(size)["CosScale"], 1.03))
    planned.append((size.short // 4, windowed(near)[2], 0.9))
    planned += [(size.short // 2, method, 1.08) for method in (*two, *wide_two)]
    planned += [(size.short, method, 1.05) for method in (*two, *wide_two)]
    for n, method, target in planned:
        pairs = count_pairs(n, n, window=method.window, sinks=method.sinks)
        used = (switches.BAND_SPANS,) if method in (*two, *wide_two) else ()
        shape = make_shape(size, n)
        yield Case("attention", method.name, method.recipe, shape, pairs, target, base, switches=used)
    n, shape = size.short // 2, Shape(4, 9, 3, size.short // 2, size.short // 2, 64)  # of SmolLM2-135M
    for method in (two[0], wide_two[0]):
        name = f"{method.name}, 4 × 9/3 heads of 64"
        pairs, used = 4 * count_pairs(n, n), (switches.BAND_SPANS,)
        yield Case("attention", name, method.recipe, shape, pairs, 1.08, base, switches=used)
    changed, shape = with_far_law(two[0], size.train_length), make_shape(size, size.middle)
    pairs = count_pairs(size.middle, size.middle)
    yield Case("share", changed.name, changed.recipe, shape, pairs, 1.005, partial(the_same, two[0].recipe, {}))


def list_switched(size: Sizes) -> Iterator[Case]:
    """Whole rows that kernels behind switches may speed up: backward, entropy, ALiBi, a chunk of a prompt."""
    two, middle, long = branched(size.windows[0])[0], size.middle, size.long
    shape, pairs = make_shape(size, size.short), count_pairs(size.short, size.short)
    plain = partial(rope_sdpa, size)
    backward = (switches.BAND_SPANS_BACKWARD,)
    yield Case("backward", two.name, two.recipe, shape, pairs, 1.12, plain, grad=True, switches=backward)
    shape, pairs = make_shape(size, middle), count_pairs(middle, middle)
    options = {**CAUSAL, "return_entropy": True}
    for method in (folded(size)["InfoScale"], two):
        base, used = partial(the_same, method.recipe, {"return_entropy": False}), (switches.BAND_ENTROPY,)
        yield Case("entropy", method.name, method.recipe, shape, pairs, 1.4, base, options, switches=used)
    slopes, columns = (switches.BAND_SLOPES,), (switches.ALIBI_COLUMNS,)
    yield Case("attention", ALIBI.name, ALIBI.recipe, shape, 0, 1.25, plain, switches=slopes)
    # a head size that the band kernel refuses
    odd = shape._replace(head_size=96)
    yield Case("attention", f"{ALIBI.name}, d 96", ALIBI.recipe, odd, pairs, 1.25, plain, switches=columns)
    yield Case("attention", ALIBI.name, ALIBI.recipe, make_shape(size, long), 0, 1.25, plain, switches=slopes)
    queries = size.short // 4
    shape, pairs = make_shape(size, middle, queries), count_pairs(queries, middle)
    name, used = f"{two.name}, last {queries}", (switches.BAND_CHUNKED_PREFILL,)
    yield Case("prefill", name, two.recipe, shape, pairs, 1.1, plain, switches=used)


def list_rows(size: Sizes) -> Iterator[Case]:
    """Eight rows of an eighth to the whole of a length, padded and packed, against as many tokens in equal rows."""
    near = size.windows[0]
    lengths = tuple(size.short * n // 16 for n in range(1, 9))
    padded = make_shape(size, lengths[-1])._replace(batch=len(lengths))
    packed = make_shape(size, sum(lengths))
    mean = sum(lengths) // len(lengths)

    def make(method: Method, how: str, shape: Shape, more: str = "", **options: Any) -> Case:
        pairs = sum(count_pairs(n, n, window=method.window) for n in lengths)
        equal = len(lengths) * count_pairs(mean, mean, window=method.window)
        options = {"target": 1.1, "lengths": lengths, "equal_pairs": equal, **options}
        name, base = f"{method.name}, {how}{more}", partial(equal_rows, size)
        return Case("rows", name, method.recipe, shape, pairs, baseline=base, **options)

    both = ("padded", padded), ("packed", packed)
    for method in (branched(near)[0], windowed(near)[0]):
        for how, shape in both:
            rows = how == "padded" and method.window is not None
            yield make(method, how, shape, switches=(switches.BAND_ROWS if rows else switches.BAND_SPANS,))
    for method in (branched(near)[0], windowed(near)[0]):
        for how, shape in both:  # without its switch FlexAttention would compile for each of them
            used = (switches.BAND_SPANS_BACKWARD,)
            yield make(method, how, shape, ", backward", grad=True, switches=used, compared=False)


def list_bidirectional(size: Sizes) -> Iterator[Case]:
    """Both directions, against all pairs."""
    near = size.windows[0]
    for head_size in sorted({64, size.size}, reverse=True):
        for n in (size.short // 2, size.short // 4, size.short):
            for method in (branched(near)[0], windowed(near)[0]):
                shape = make_shape(size, n)._replace(head_size=head_size)
                pairs = count_pairs(n, n, False, method.window)
                yield Case(
                    "bidirectional", f"{method.name}, d {head_size}", method.recipe, shape, pairs, 1.1,
                    partial(rope_sdpa, size), BOTH, switches=(switches.BAND_SPANS,),
                )  # fmt: skip


def list_odd_rows(size: Sizes) -> Iterator[Case]:
    """Padded rows with a head size that the band kernel refuses, and gradients, for which FlexAttention compiles."""
    method, n = windowed(size.windows[0])[0], size.short // 4
    lengths = tuple(n * i // 4 for i in range(1, 5))
    shape = make_shape(size, n)._replace(batch=len(lengths), head_size=96)
    pairs = sum(count_pairs(x, x, window=method.window) for x in lengths)
    base, used = partial(equal_rows, size), (switches.PACKED_PADDING,)
    name = f"{method.name}, padded, d 96, backward"
    yield Case("rows", name, method.recipe, shape, pairs, None, base, CAUSAL, lengths, True, used)


def list_retrieve(size: Sizes) -> Iterator[Case]:
    """One query that chooses its far keys in two launches, against the same without the switch."""
    recipe, shape = f"{branched(size.windows[0])[0].recipe}+retrieve", make_shape(size, size.middle, 1)
    base, used = partial(the_same, recipe, {}), (switches.ONE_QUERY,)
    yield Case("retrieve", "one query", recipe, shape, 0, None, base, switches=used, compared=False)


def _list_jobs(size: Sizes, case: Case) -> Iterator[Job]:
    """One job that measures everything, and one that says what the switched kernels took in it."""
    done: dict[str, Row | Exception] = {}
    variants = list_variants(case, size.switched)
    n, (first, *others) = case.shape.keys, [case.method + key for key in variants]
    yield Job(case.group, first, n, partial(_measure, size, case, variants, done))
    for name, key in zip(others, list(variants)[1:], strict=True):
        if key in done:
            yield Job(case.group, name, n, partial(_give, done[key]), free=True)


def list_variants(case: Case, switched: bool = True) -> dict[str, frozenset[str]]:
    """Return the switches that a case is measured with, by what the name of its row adds: without its own, then with.

    The defaults are one of the two, and add nothing; they are the only one unless `switched`.
    """
    if not switched:
        return {"": switches.DEFAULTS}
    used, defaults = frozenset(case.switches), switches.DEFAULTS
    if more := "+".join(name for name in case.switches if name not in defaults):
        variants = {"": defaults, f", with {more}": defaults | used}
    else:
        variants = {f", without {'+'.join(case.switches)}": defaults - used, "": defaults}
    return variants if used and case.compared else dict([variants.popitem()])


def _give(result: Row | Exception) -> Row:
    if isinstance(result, Exception):
        raise result
    return result


def _measure(size: Sizes, case: Case, variants: dict[str, frozenset[str]], done: dict[str, Row | Exception]) -> Row:
    tensors = make_tensors(size, case)
    calls = {key: make_call(case, tensors, used) for key, used in variants.items()}
    base, baseline = case.baseline(case, tensors)
    done |= _find_errors(case, calls)
    good = {key: call for key, call in calls.items() if key not in done}
    if good:
        *taken, base_ms = times((*good.values(), base), shorten(size))
        flops = (BACKWARD_FLOPS if case.grad else 1) * 4.0 * case.pairs * case.shape.heads * case.shape.head_size
        moved = sum(x.nbytes for x in tensors if x is not None) + tensors.q.nbytes
        limits = (flops, moved) if case.pairs else (None, None)
        without = next(iter(variants))
        for key, ms in zip(good, taken, strict=True):
            row: Row = {"ms": ms, "baseline": baseline, "baseline_ms": base_ms, "ratio": ms / base_ms}
            row |= {"target": case.target, **rates(ms, *limits), **_compare_pairs(case, row["ratio"])}
            if key != without and without in good:
                row["of_without"] = ms / taken[0]
                row["note"] = "; ".join(filter(None, (f"{row['of_without']:.2f} × without", row.get("note"))))
            done[key] = row
    return _give(done[next(iter(variants))])


def _find_errors(case: Case, calls: dict[str, Call]) -> dict[str, Row | Exception]:
    """Run every call once; return why those that fail do, or differ from the first."""
    errors: dict[str, Row | Exception] = {}
    expected: list[Tensor] | None = None
    for key, call in calls.items():
        try:
            result = _list_tensors(call())
            if result[0].is_cuda:
                torch.cuda.synchronize()
            if expected is None:
                expected = result
            elif not (found := _find_distance(case, result, expected)) < AWAY:
                raise AssertionError(f"{found:.1%} away from the call without the switch")
        except Exception as error:  # whatever it is, the others are measured
            errors[key] = error
    return errors


def _list_tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [x.entropy if isinstance(x, ise.Aux) else x for x in result]


def _find_distance(case: Case, result: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference as a share of the largest entry, padded slots left out."""
    lengths = case.lengths if case.lengths and not case.packed else (case.shape.keys,) * case.shape.batch
    distances = []
    for x, y in zip(result, expected, strict=True):
        for row, n in enumerate(lengths):
            ours, theirs = (z[row, :, :n].float() for z in (x, y))
            distances.append((ours - theirs).abs().max() / theirs.abs().max())
    return float(torch.stack(distances).max())  # NaN where one is


def _compare_pairs(case: Case, ratio: float) -> Row:
    """Return what the ratio is by pairs, where the baseline has as many tokens but not as many pairs."""
    if not case.equal_pairs:
        return {}
    by_pairs = ratio * case.equal_pairs / case.pairs
    return {"ratio_by_pairs": by_pairs, "note": f"{sum(case.lengths):,} tokens; {by_pairs:.2f} by pairs"}


def _list_decoding(size: Sizes) -> Iterator[Job]:
    """One query a row against a cache: how much of the memory's bandwidth it reaches."""
    batch = size.batches[-1]
    for heads, key_heads, d in ((9, 3, 64), (size.heads, size.heads // 4, size.size)):
        shape = Shape(batch, heads, key_heads, 1, size.middle, d)
        for method in (folded(size)["InfoScale"], branched(size.windows[-1])[0]):
            name = f"{method.name}, {batch} × {heads}/{key_heads} heads of {d}"
            yield Job("decode", name, size.middle, partial(measure_decoding, size, shape, method.recipe))


def measure_decoding(size: Sizes, shape: Shape, recipe: str) -> Row:
    """Calls one after another in a CUDA graph; the target is a share of the time that reading k and v takes."""
    case = Case("", "", recipe, shape, shape.batch * shape.keys, None, partial(rope_sdpa, size))
    tensors = make_tensors(size, case)
    layout = Layout(shape.batch, 1, shape.keys, tensors.q.device)  # one made while a graph is captured would be timed
    call = make_call(case, tensors, switches.DEFAULTS, layout=layout)
    flops, moved = 4.0 * case.pairs * shape.heads * shape.head_size, tensors.k.nbytes + tensors.v.nbytes

    def several() -> Any:
        return [call() for _ in range(CALLS_IN_GRAPH)][-1]

    run = captured(several)[0].replay if size.device == "cuda" else several
    ms = times((run,), shorten(size))[0] / CALLS_IN_GRAPH
    limit, speed = find_limit(None, moved), moved / ms / 1e6
    row = {"ms": ms, **rates(ms, flops, moved), "gb_per_second": speed, "note": f"{speed:,.0f} GB/s of k and v"}
    if limit is None:
        return row
    bound = {"baseline": "k and v at the peak bandwidth", "baseline_ms": limit, "ratio": ms / limit}
    return row | bound | {"target": 1 / MIN_BANDWIDTH_SHARE}
