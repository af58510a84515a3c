"""Plans: which checkpoints, under which recipes, at which lengths; read from YAML, unknown keys refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from isentrope.evaluation.masked_lm import MaskingProtocol
from isentrope.models.gau.config import GAUAlphaConfig, build_gau_recipe
from isentrope.pretrained import read_config_as
from isentrope.training.config import configured

PLANS = files("isentrope.experiments") / "plans"
LIBRARY = "checkpoints"  # the plan file that holds the trainings all plans may name
VARIANTS = {"plain": (False, False), "C.S.": (True, False), "I.S.": (False, True), "both": (True, True)}


@dataclass(frozen=True)
class Checkpoint:
    """A model to evaluate: one that ships (`shipped`), a folder (`path`), or one to train.

    train: options of `regimen.configured`, where "model" may name another checkpoint to start from, a folder or a name
    on the hub. seeded: trained anew for each of the plan's seeds.
    """

    name: str
    shipped: str | None = None
    path: str | None = None
    train: dict[str, Any] | None = None
    seeded: bool = True

    def __post_init__(self) -> None:
        if sum(way is not None for way in (self.shipped, self.path, self.train)) != 1:
            raise ValueError(f"checkpoint {self.name!r}: expected one of shipped, path and train")


@dataclass(frozen=True)
class Row:
    """A line of the table. fit: with a temperature fitted to validation documents at each length."""

    method: str
    variant: str
    checkpoint: str
    recipe: str
    fit: bool = False


@dataclass(frozen=True)
class Plan:
    """A study. train_length: what recipes take for it where they leave it open. data: a corpus to prepare."""

    name: str
    title: str
    lengths: tuple[int, ...]
    rows: tuple[Row, ...]
    checkpoints: dict[str, Checkpoint]
    label: str = ""
    train_length: int = 64
    protocol: MaskingProtocol = field(default_factory=MaskingProtocol)
    seeds: tuple[int, ...] = (0,)
    entropy: bool = True
    data: str | None = None
    claims: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 2 or len(set(self.lengths)) != len(self.lengths):
            raise ValueError(f"plan {self.name}: lengths: expected different numbers from 2 on, got {self.lengths}")
        if not self.rows:
            raise ValueError(f"plan {self.name}: expected rows or methods, got none")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"plan {self.name}: seeds: expected one or more, each once, got {self.seeds}")
        seen = set[tuple[str, str]]()
        for row in self.rows:
            if (row.method, row.variant) in seen:
                raise ValueError(f"plan {self.name}: expected each row once, got {row.method} {row.variant} twice")
            seen.add((row.method, row.variant))
            if row.checkpoint not in self.checkpoints:
                raise ValueError(f"plan {self.name}: unknown checkpoint {row.checkpoint!r}{_hint(row.checkpoint, self.checkpoints)}")  # fmt: skip  # noqa: E501
            try:  # before anything is trained
                if build_gau_recipe(row.recipe, self.train_length, 128).temperature is not None and row.fit:
                    raise ValueError(f"fit: expected a recipe without a temperature, got {row.recipe}")
            except ValueError as error:
                raise ValueError(f"plan {self.name}: {row.method} {row.variant}: {error}") from None

        for checkpoint in self.needed():
            self._check_training(checkpoint)
        for claim in self.claims:
            self._check_claim(claim, seen)

    def _check_training(self, checkpoint: Checkpoint) -> None:
        where, options = f"plan {self.name}: checkpoint {checkpoint.name!r}", dict(checkpoint.train or {})
        start = str(options.get("model", ""))
        if start and start not in self.checkpoints and "/" not in start:
            raise ValueError(f"{where}: unknown start {start!r}{_hint(start, self.checkpoints)}")
        try:
            if checkpoint.train and configured(options.pop("preset", "train"), **options).objective != "masked":
                raise ValueError("objective: expected masked, which this evaluates, got causal")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from None

    def _check_claim(self, claim: dict[str, Any], rows: set[tuple[str, str]]) -> None:
        where = f"plan {self.name}: claim {claim.get('text')!r}"
        needs = {
            "better": ("metric", "length", "this", "than"),
            "best_grows": ("metric", "methods", "variant", "lengths"),
        }
        if claim.get("kind") not in needs:
            raise ValueError(f"{where}: kind: expected one of {', '.join(needs)}, got {claim.get('kind')!r}")
        missing = [key for key in ("text", *needs[claim["kind"]]) if key not in claim]
        if missing or claim["metric"] not in ("ppl", "acc"):
            raise ValueError(f"{where}: expected {', '.join(missing) or 'metric ppl or acc'}")
        if claim["kind"] == "best_grows":
            named = [{"method": method, "variant": claim["variant"]} for method in claim["methods"]]
        else:
            named = [claim["this"], *(claim["than"] if isinstance(claim["than"], list) else [claim["than"]])]
        for row in named:
            if not isinstance(row, dict) or (row.get("method"), row.get("variant")) not in rows:
                raise ValueError(f"{where}: expected a row of the plan, got {row}")

    @property
    def size(self) -> int:
        """Cells."""
        return len(self.lengths) * sum(len(self.seeds_of(row.checkpoint)) for row in self.rows)

    def seeds_of(self, checkpoint: str) -> tuple[int, ...]:
        """The seeds a checkpoint is trained with: one where nothing is trained."""
        found = self.checkpoints[checkpoint]
        return self.seeds if found.train and found.seeded else self.seeds[:1]

    def needed(self) -> list[Checkpoint]:
        """The checkpoints that rows ask for, after those they start from."""
        ordered: dict[str, Checkpoint] = {}

        def add(name: str, above: tuple[str, ...]) -> None:
            if name in above:
                raise ValueError(f"plan {self.name}: checkpoints start from each other: {' → '.join((*above, name))}")
            checkpoint = self.checkpoints[name]
            start = (checkpoint.train or {}).get("model")
            if start in self.checkpoints:
                add(start, (*above, name))
            ordered.setdefault(name, checkpoint)

        for row in self.rows:
            add(row.checkpoint, ())
        return list(ordered.values())


def names() -> list[str]:
    """The plans that ship."""
    found = (Path(str(path)).stem for path in PLANS.iterdir() if str(path).endswith(".yaml"))
    return sorted(name for name in found if name != LIBRARY)


def load(word: str) -> Plan:
    """A plan by its name, or from a YAML file."""
    path = Path(word)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ValueError(f"{word}: expected a file with a plan")
        return parse(path.stem, path.read_text(encoding="utf-8"))
    if word not in names():
        raise ValueError(f"plan: unknown {word!r}{_hint(word, names())}")
    return parse(word, (PLANS / f"{word}.yaml").read_text(encoding="utf-8"))


def parse(name: str, text: str) -> Plan:
    """The plan that a YAML text stands for."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"plan {name}: expected YAML, got {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"plan {name}: expected keys and values, got {type(data).__name__}")
    known = {f.name for f in fields(Plan)} - {"name"} | {"methods", "variants"}
    _refuse_unknown(f"plan {name}", data, known)
    library = {} if name == LIBRARY else _library()
    own = {key: _checkpoint(key, value) for key, value in (data.pop("checkpoints", None) or {}).items()}
    rows = [_row(name, row) for row in data.pop("rows", None) or []]
    rows += _expanded(name, data.pop("methods", None) or [], data.pop("variants", None) or list(VARIANTS))
    protocol = data.pop("protocol", None) or {}
    _refuse_unknown(f"plan {name}: protocol", protocol, {f.name for f in fields(MaskingProtocol)})
    for key, kind in (("lengths", int), ("seeds", int), ("claims", dict), ("notes", str)):
        given = data.get(key, [])
        if not isinstance(given, list) or not all(isinstance(item, kind) for item in given):
            raise ValueError(f"plan {name}: {key}: expected a list of {kind.__name__}, got {given!r}")
        if key in data:
            data[key] = tuple(given)
    missing = [key for key in ("title", "lengths") if key not in data]
    if missing:
        raise ValueError(f"plan {name}: missing {', '.join(missing)}")
    try:
        masking = MaskingProtocol(**protocol)
        return Plan(name=name, rows=tuple(rows), checkpoints=library | own, protocol=masking, **data)
    except TypeError as error:
        raise ValueError(f"plan {name}: {error}") from None


def _library() -> dict[str, Checkpoint]:
    data = yaml.safe_load((PLANS / f"{LIBRARY}.yaml").read_text(encoding="utf-8"))
    return {key: _checkpoint(key, value) for key, value in data.items()}


def _checkpoint(name: str, data: Any) -> Checkpoint:
    _refuse_unknown(f"checkpoint {name}", data, {f.name for f in fields(Checkpoint)} - {"name"})
    return Checkpoint(name=name, **data)


def _row(plan: str, data: Any) -> Row:
    _refuse_unknown(f"plan {plan}: row", data, {f.name for f in fields(Row)})
    missing = [key for key in ("method", "checkpoint", "recipe") if key not in data]
    if missing:
        raise ValueError(f"plan {plan}: row {data}: missing {', '.join(missing)}")
    if not isinstance(data.get("fit", False), bool):
        raise ValueError(f"plan {plan}: row {data}: fit: expected true or false, got {data['fit']!r}")
    words = {key: str(value) for key, value in data.items() if key != "fit"}
    return Row(**{"variant": "plain"} | words, fit=data.get("fit", False))


def _expanded(plan: str, methods: Iterable[Any], variants: Iterable[str]) -> list[Row]:
    """Each method with neither, either, both: `cosine` is its checkpoint with CosScale `alpha`."""
    rows = []
    for data in methods:
        where = f"plan {plan}: method"
        _refuse_unknown(where, data, {"method", "recipe", "checkpoint", "cosine", "alpha", "infoscale", "variants"})
        given = list(data.get("variants") or variants)
        wanted = {"method", "recipe"} | {"cosine" if VARIANTS.get(v, (False,))[0] else "checkpoint" for v in given}
        if missing := sorted(wanted - data.keys()):
            raise ValueError(f"{where} {data.get('method', '')}: missing {', '.join(missing)}")
        for variant in given:
            if variant not in VARIANTS:
                raise ValueError(f"{where}: unknown variant {variant!r}{_hint(str(variant), VARIANTS)}")
            cosine, info = VARIANTS[variant]
            parts = [data["recipe"]]
            parts += [f"cosine:alpha={data.get('alpha', 128)}"] if cosine else []
            parts += [data.get("infoscale", "infoscale:count=sequence")] if info else []
            checkpoint = data["cosine" if cosine else "checkpoint"]
            rows.append(Row(str(data["method"]), variant, checkpoint, "+".join(parts)))
    return rows


def changed(plan: Plan, lengths: str | None, positions: int | None, seeds: str | None) -> Plan:
    """The plan with what a command line says in place of its own; positions 0 means all."""
    changes: dict[str, Any] = {}
    if lengths is not None:
        changes["lengths"] = numbers("lengths", lengths)
    if seeds is not None:
        changes["seeds"] = numbers("seeds", seeds)
    if positions is not None:
        changes["protocol"] = replace(plan.protocol, positions=positions or None)
    return replace(plan, **changes)


def single(model: str, recipes: Iterable[str], lengths: str, positions: int, protocol: str) -> Plan:
    """One model under several recipes."""
    rows = tuple(Row(recipe, "plain", "model", recipe) for recipe in recipes)
    trained = read_config_as(GAUAlphaConfig, model).max_position_embeddings
    return Plan(
        name="-".join(("evaluate", *Path(model).parts[-2:])).replace("/", ""),
        title=f"{Path(model).name} under {len(rows)} recipes",
        lengths=numbers("lengths", lengths),
        rows=rows,
        checkpoints={"model": Checkpoint("model", path=model)},
        protocol=MaskingProtocol(protocol, positions=positions or None),
        train_length=trained,
    )


def numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"{name}: expected numbers with commas between, got {text!r}") from None


# studies without cells, for the same list: commands of their own
OTHERS = {
    "laws": {"label": "table1", "title": "The temperature laws: formulas, and what each does to attention entropy"},
    "dataset": {"label": "table 9.1.1", "title": "A corpus' partition: statistics, and a figure"},
}


def described(name: str) -> dict[str, Any]:
    """What a list of plans says of one."""
    if name in OTHERS:
        return {"name": name, "cells": 0, "trainings": 0} | OTHERS[name]
    plan = load(name)
    trainings = [checkpoint for checkpoint in plan.needed() if checkpoint.train]
    return {"name": name, "label": plan.label, "title": plan.title, "cells": plan.size, "trainings": len(trainings)}


def _refuse_unknown(where: str, data: Any, known: set[str]) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected keys and values, got {data!r}")
    for key in data:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}{_hint(str(key), known)}")


def _hint(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"
