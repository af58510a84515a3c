"""Random attention on every CPU backend against the fp64 reference.

`case(seed)` draws a recipe, sizes, mask, padding, packing, positions, dtype and scale; `check(case)` compares output,
log-sum-exp, entropy and gradients, and counts what is right and what is refused.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from math import log2
from typing import Any

import torch
from torch import Tensor

import isentrope as ise
from tests.contract import precision
from tests.contract.matrix import CPU_BACKENDS, NAMES, TOLERANCE, build, difference, run
from tests.contract.precision import Plain

BACKENDS = (*CPU_BACKENDS, "flex")
ROWS = ("", "", "lengths", "left", "documents", "documents+lengths", "documents+left", "positions", "queries", "pair")
DTYPES = (torch.float64, torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """One attention. It has what `tests.contract.matrix.Setting` has."""

    seed: int
    recipe: ise.Recipe
    causal: bool
    dtype: torch.dtype
    gradients: bool
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    d: int
    dv: int
    rows: str
    scale: float | None
    spoiled: float  # what stands in padded keys and values
    strided: bool

    def __str__(self) -> str:
        given = {name: value for name, value in vars(self).items() if name != "recipe"}
        return f"{self.recipe} {given}"

    def tensors(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> list[Tensor]:
        make = torch.Generator().manual_seed(self.seed)
        shapes = (
            (self.batch, self.heads, self.queries, self.d),
            (self.batch, self.kv_heads, self.keys, self.d),
            (self.batch, self.kv_heads, self.keys, self.dv),
        )
        # the reference sees what low precision sees
        q, k, v = (torch.randn(s, generator=make, dtype=torch.float64).to(self.dtype).to(dtype) for s in shapes)
        padded = self._padded()[:, None, :, None]
        k, v = k.masked_fill(padded, self.spoiled), v.masked_fill(padded, self.spoiled)
        return [x.mT.contiguous().mT if self.strided else x for x in (q, k, v)]

    def arguments(self, device: str = "cpu") -> dict[str, Any]:
        given: dict[str, Any] = {} if self.scale is None else {"scale": self.scale}
        make = random.Random(self.seed + 1)
        if "documents" in self.rows:
            given["mask"] = ise.Document(torch.tensor([self._documents(make) for _ in range(self.batch)]))
        if "lengths" in self.rows:
            given["lengths"] = self._counts()
        elif "left" in self.rows:
            padding = ise.Padding(self._counts(), "left")
            given["mask"] = given["mask"] & padding if "mask" in given else padding
        if self.rows in ("positions", "queries", "pair"):
            steps = torch.tensor([[make.choice((0, 1, 1, 1, 7)) for _ in range(self.keys)] for _ in range(self.batch)])
            keys = steps.cumsum(1) + make.randint(0, 50)
            queries = torch.tensor([[make.randint(0, 90) for _ in range(self.queries)] for _ in range(self.batch)])
            given["position_ids"] = {"positions": keys, "queries": queries, "pair": (queries, keys)}[self.rows]
        return given

    def _documents(self, make: random.Random) -> list[int]:
        ids = [0]
        while len(ids) < self.keys:
            ids.append(ids[-1] + (make.random() < 0.15))
        return ids

    def _counts(self) -> Tensor:
        make = random.Random(self.seed + 2)
        return torch.tensor([make.choice((self.keys, make.randint(0, self.keys))) for _ in range(self.batch)])

    def _padded(self) -> Tensor:
        """(batch, keys)."""
        slots = torch.arange(self.keys)
        if "lengths" in self.rows:
            return slots >= self._counts()[:, None]
        if "left" in self.rows:
            return slots < (self.keys - self._counts())[:, None]
        return torch.zeros(self.batch, self.keys, dtype=torch.bool)


def case(seed: int) -> Case:
    """The same for the same seed."""
    make = random.Random(seed)
    dtype = make.choice(DTYPES)
    narrow = dtype != torch.float64
    kv_heads = make.choice((1, 2, 3))
    # low precision is judged by a norm: of so many entries that luck plays no part in it
    keys = make.randint(24, 60) if narrow else make.choice((1, 2, make.randint(3, 30), make.randint(30, 140)))
    queries = keys if make.random() < 0.5 else make.choice((1, make.randint(1, keys), make.randint(1, 40)))
    sizes = {
        "batch": 2 if narrow else make.choice((1, 2, 3)),
        "heads": kv_heads * make.choice((1, 2) if narrow else (1, 2, 4)),
        "kv_heads": kv_heads,
        "queries": max(queries, 4) if narrow else queries,
        "keys": keys,
        "d": make.choice((32, 64)) if narrow else make.choice((4, 8, 16, 40)),
        "dv": make.choice((32, 64)) if narrow else make.choice((1, 5, 16, 24, 300)),
    }
    rows = make.choice(ROWS)
    if rows == "positions" and sizes["queries"] > keys:
        rows = ""  # refused: where would they be?
    drawn = Case(
        seed=seed, recipe=ise.Recipe(), causal=make.random() < 0.6, dtype=dtype, gradients=make.random() < 0.7,
        rows=rows, scale=None if make.random() < 0.7 else make.choice((0.02, 0.3, 1.0)),
        spoiled=make.choice((0.0, torch.nan, torch.inf, -torch.inf)), strided=make.random() < 0.2, **sizes,
    )  # fmt: skip
    method = position(make, drawn.d)
    laws = far_laws(make, keys) if "window=" in method and make.random() < 0.7 else temperature(make, keys)
    parts = (method, laws, mask(make, keys), score(make))
    object.__setattr__(drawn, "recipe", build(*parts, drawn))
    return drawn


def position(make: random.Random, d: int) -> str:
    window, length = make.choice((1, 2, 5, 9, 30, 200)), make.choice((1, 8, 20, 64, 4096))
    turned = [f"base={make.choice((1.5, 100, 10000, 5e5))!r}", f"layout={make.choice(('half', 'interleaved'))}"]
    if make.random() < 0.3:
        turned.append(f"rotary_dim={make.choice([n for n in (4, 8, 16, 32, d) if n <= d])}")
    options = ",".join(turned[: make.randint(0, len(turned))])
    name = make.choice(
        (
            "", "nope", "alibi", "rope",
            f"pi:factor={make.choice((1, 4, 1000.5))}", f"ntk:factor={make.choice((1, 4, 64))}",
            f"ntk:factor=2,dynamic=True,original_length={length}", f"yarn:factor=8,original_length={length}",
            f"rerope:window={window}", f"leakyrerope:window={window},leak={make.choice((1, 3, 16))}",
            f"selfextend:window={window},group={make.choice((1, 3, 8))}", f"dualchunk:chunk={window + 1}",
            f"string:shift={window}", f"clex:dim={d},train_length={max(8, length)}",
            f"dpe:window={window},scales={make.choice(((3,), (1, 8)))}", f"resonance:factor=4,original_length={length}",
            f"cope:original_length={length}",
        )
    )  # fmt: skip
    if name in ("", "nope", "alibi") or name.startswith("clex") or not options:
        return name
    return name + (":" if ":" not in name else ",") + options


def temperature(make: random.Random, keys: int) -> str:
    trained = make.choice((2, 8, 16, 64, 4096))
    options = f",clamp={make.random() < 0.7},count={make.choice(('visible', 'sequence', 'position'))}"
    name = make.choice(
        (
            "", "", "constant", "loglength", f"softmaxplus:base={trained + 0.5}", f"logn:train_length={trained}",
            f"yarntemperature:train_length={trained}", "yarntemperature:factor=16", f"infoscale:train_length={trained}",
            f"infoscale:train_length={trained},epsilon={make.choice((-1.0, 0.3))}", f"llama4:floor={trained}",
            f"infoscaleexact:train_length={trained}", f"power:train_length={trained}",
            f"power:train_length={trained},gamma={{table}}", "ssmax:heads={heads},bias=True",
            f"fitted:lengths=({trained},{2 * trained},{9 * trained}),table=(1.0,1.4,0.8)",
        )
    )  # fmt: skip
    if not name or name.startswith("ssmax") or make.random() < 0.4:
        return name
    return name + (options if ":" in name else ":" + options[1:])


def far_laws(make: random.Random, keys: int) -> str:
    """Temperatures and a share law, of near and far keys."""
    laws = []
    for kind in make.choice((("near",), ("far",), ("near", "far"), ("far", "near"), ())):
        law = temperature(make, keys)
        laws += [law + ("," if ":" in law else ":") + f"keys={kind}"] if law else []
    if not laws or make.random() < 0.7:
        beta = make.choice((0, 0.5, 1, -1.5, 4, "{table}"))
        share = f"share:beta={beta},reference={make.choice((1, 2, 7, 30))},count={make.choice(('far', 'visible'))}"
        laws.insert(make.randint(0, len(laws)), share)
    return "+".join(laws)


def mask(make: random.Random, keys: int) -> str:
    def one() -> str:
        size, sinks = make.choice((1, 2, 9, 30, 500)), make.choice((0, 1, 4, 40))
        windowed = (f"window:size={size}", f"sink:sinks={sinks},size={size}", f"lambda:sinks={sinks},window={size}")
        return make.choice(("causal", "full", *windowed, *windowed))

    if make.random() < 0.4:
        return ""
    first = one()
    for _ in range(make.choice((0, 0, 0, 1, 2))):
        first = f"({first}){make.choice('&|')}{one()}"
    return first


def score(make: random.Random) -> str:
    return make.choice(("", "", "dot", f"cosine:alpha={make.choice((0.5, 16, 128))}"))


def check(drawn: Case) -> dict[str, int]:
    """How many backends were right and how many refused; an AssertionError says where one was wrong."""
    counted: Counter[str] = Counter(right=0, refused=0)
    try:
        truth = run(drawn.recipe, drawn, drawn.causal, "reference", torch.float64, gradients=drawn.gradients)
    except ValueError as error:
        truth, why = None, str(error)
    plain = None if truth is None else by_hand(drawn)
    for backend in BACKENDS if drawn.seed % 8 == 0 else CPU_BACKENDS:  # FlexAttention is slow on a CPU
        gradients = drawn.gradients and backend != "flex"
        try:
            ours = run(drawn.recipe, drawn, drawn.causal, backend, drawn.dtype, gradients=gradients)
        except ValueError as error:
            if truth is not None and not str(error).startswith(f"backend '{backend}' cannot compute this"):
                raise AssertionError(f"{drawn} on {backend}: refused, but not by the reference: {error}") from error
            counted["refused"] += 1
            continue
        except Exception as error:
            raise AssertionError(f"{drawn} on {backend}: {type(error).__name__}: {str(error)[:200]}") from error
        assert truth is not None, f"{drawn} on {backend}: not refused, but by the reference: {why}"
        compare(drawn, backend, ours, truth, plain)
        counted["right"] += 1
    return dict(counted)


def compare(drawn: Case, backend: str, ours: list[Tensor], truth: list[Tensor], plain: Plain | None) -> None:
    if plain is None:
        lse = truth[NAMES.index("lse")]
        size = max(1.0, lse[lse.isfinite()].abs().max().item() if lse.isfinite().any() else 0.0)
        errors = dict(zip(NAMES, map(difference, ours, truth), strict=False))
        wrong = {name: error for name, error in errors.items() if not error < TOLERANCE * size}
        assert not wrong, f"{drawn} on {backend}: {wrong}"
        return
    try:
        precision.compare(ours, truth, plain, backend, "")
    except AssertionError as error:
        raise AssertionError(f"{drawn} on {backend}: {str(error).partition(' of ')[0] or 'not finite'}") from error


def by_hand(drawn: Case) -> Plain | None:
    """Plain attention in low precision, which others are judged by; None in fp64."""
    if drawn.dtype == torch.float64:
        return None
    # written by hand it reads padding
    plain = precision.eager(drawn.recipe, replace(drawn, spoiled=0.0), drawn.causal, drawn.dtype, "cpu")
    # Among thousands of cases some meet what sums in pairs may lose: eps/2 for each time that their terms are halved.
    # Some processors add up the products of fp16 in fp16, so that a score of one key alone shows it.
    times = log2(drawn.d * drawn.keys) / 2
    sizes = {name: size if name == "out" else times * size for name, size in plain.subtracted.items()}
    return plain._replace(subtracted=sizes)
