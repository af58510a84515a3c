"""Plans for masked models: which checkpoints, under which recipes, at which lengths."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from isentrope.evaluation.masked_lm import MaskingProtocol
from isentrope.experiments.plan_schema import CheckpointEntry, MaskedFile, Method
from isentrope.models.gau.config import GAUAlphaConfig, build_gau_recipe
from isentrope.pretrained import read_config_as
from isentrope.recipe import LayerRecipes
from isentrope.recipe.layers import add_parts
from isentrope.training.config import build_config
from isentrope.utils.messages import suggest
from isentrope.utils.parsing import parse_numbers

# whether a variant has CosScale, and InfoScale
VARIANTS = {"plain": (False, False), "C.S.": (True, False), "I.S.": (False, True), "both": (True, True)}


@dataclass(frozen=True)
class Checkpoint:
    """A model to evaluate: give exactly one of shipped, path and train.

    Args:
        name: Of the checkpoint.
        shipped: Name of a model that ships.
        path: Folder of a model.
        train: Arguments of `build_config`; "model" may name another checkpoint, a folder or a name on the hub.
        seeded: Train one model for each of the plan's seeds.
    """

    name: str
    shipped: str | None = None
    path: str | None = None
    train: dict[str, Any] | None = None
    seeded: bool = True

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.shipped, self.path, self.train)) != 1:
            raise ValueError(f"checkpoint {self.name!r}: expected one of shipped, path and train")


@dataclass(frozen=True)
class PlanRow:
    """A row of the results table.

    Args:
        method: Its position method or mask, by which rows are grouped.
        variant: What is added to the method.
        checkpoint: Name of the model.
        recipe: As text.
        fit: Fit a law to validation documents at each length: a temperature, where there are far keys theirs and a
            share law.
    """

    method: str
    variant: str
    checkpoint: str
    recipe: str
    fit: bool = False


@dataclass(frozen=True)
class MaskedPlan:
    """A study of masked models: every row at every length.

    Args:
        name: Of the plan, and of its folder of results.
        title: Of the report.
        lengths: Tokens that models are evaluated at.
        rows: Of the results table.
        checkpoints: All that rows and trainings may name.
        label: The table of the paper.
        train_length: For recipes that leave it open.
        protocol: What is masked.
        seeds: Of the trainings.
        entropy: Also measure attention entropy.
        data: A corpus to prepare if none is given.
        claims: Of the paper, checked by the report.
        notes: For the report.
    """

    name: str
    title: str
    lengths: tuple[int, ...]
    rows: tuple[PlanRow, ...]
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
                hint = suggest(row.checkpoint, self.checkpoints)
                raise ValueError(f"plan {self.name}: unknown checkpoint {row.checkpoint!r}{hint}")
            try:  # before anything is trained
                recipe = build_gau_recipe(row.recipe, self.train_length, 128)
                if row.fit and (isinstance(recipe, LayerRecipes) or recipe.temperatures or recipe.share is not None):
                    expected = "a recipe without a temperature and a share law, the same for all layers"
                    raise ValueError(f"fit: expected {expected}, got {row.recipe}")
            except ValueError as error:
                raise ValueError(f"plan {self.name}: {row.method} {row.variant}: {error}") from None

        for checkpoint in self.required_checkpoints():
            self._check_training(checkpoint)
        for claim in self.claims:
            self._check_claim(claim, seen)

    def _check_training(self, checkpoint: Checkpoint) -> None:
        where, options = f"plan {self.name}: checkpoint {checkpoint.name!r}", dict(checkpoint.train or {})
        start = str(options.get("model", ""))
        if start and start not in self.checkpoints and "/" not in start:
            raise ValueError(f"{where}: unknown start {start!r}{suggest(start, self.checkpoints)}")
        try:
            if checkpoint.train and build_config(options.pop("preset", "train"), **options).objective != "masked":
                raise ValueError("objective: expected masked, the only one that these plans evaluate, got causal")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from None

    def _check_claim(self, claim: dict[str, Any], rows: set[tuple[str, str]]) -> None:
        where = f"plan {self.name}: claim {claim.get('text')!r}"
        required = {
            "better": ("metric", "length", "this", "than"),
            "best_grows": ("metric", "methods", "variant", "lengths"),
            "superior": ("metric", "length", "this", "than"),
            "equivalent": ("metric", "length", "this", "than"),
        }
        if claim.get("kind") not in required:
            raise ValueError(f"{where}: kind: expected one of {', '.join(required)}, got {claim.get('kind')!r}")
        missing = [key for key in ("text", *required[claim["kind"]]) if key not in claim]
        if missing or claim["metric"] not in ("ppl", "acc"):
            raise ValueError(f"{where}: expected {', '.join(missing) or 'metric ppl or acc'}")
        if claim["kind"] in ("superior", "equivalent") and isinstance(claim["than"], list):
            raise ValueError(f"{where}: than: expected one row, got {len(claim['than'])}; write a claim for each")
        if claim["kind"] == "best_grows":
            named = [{"method": method, "variant": claim["variant"]} for method in claim["methods"]]
        else:
            named = [claim["this"], *(claim["than"] if isinstance(claim["than"], list) else [claim["than"]])]
        for row in named:
            if not isinstance(row, dict) or (row.get("method"), row.get("variant")) not in rows:
                raise ValueError(f"{where}: expected a row of the plan, got {row}")

    @property
    def num_cells(self) -> int:
        return len(self.lengths) * sum(len(self.seeds_of(row.checkpoint)) for row in self.rows)

    def seeds_of(self, checkpoint: str) -> tuple[int, ...]:
        """Return the seeds of a checkpoint's trainings; one if it is not trained for each seed."""
        spec = self.checkpoints[checkpoint]
        return self.seeds if spec.train and spec.seeded else self.seeds[:1]

    def required_checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints of the rows, each after the one it starts from."""
        ordered: dict[str, Checkpoint] = {}

        def add(name: str, descendants: tuple[str, ...]) -> None:
            if name in descendants:
                raise ValueError(
                    f"plan {self.name}: checkpoints start from each other: {' → '.join((*descendants, name))}"
                )
            checkpoint = self.checkpoints[name]
            start = (checkpoint.train or {}).get("model")
            if start in self.checkpoints:
                add(start, (*descendants, name))
            ordered.setdefault(name, checkpoint)

        for row in self.rows:
            add(row.checkpoint, ())
        return list(ordered.values())


def parse_masked_plan(name: str, data: dict[str, Any], library: dict[str, Checkpoint]) -> MaskedPlan:
    """Build a plan from the content of its YAML file.

    Args:
        name: Of the plan.
        data: The content; `methods` are expanded to rows, one for each of their `variants`.
        library: Checkpoints that the plan may name beside its own.
    """
    file = MaskedFile.read(f"plan {name}", data)
    rows = [PlanRow(row.method, row.variant, row.checkpoint, row.recipe, row.fit) for row in file.rows]
    rows += _expand_methods(f"plan {name}", file.methods, file.variants or tuple(VARIANTS))
    own = {key: Checkpoint(key, **entry.given()) for key, entry in file.checkpoints.items()}
    return MaskedPlan(
        name=name,
        rows=tuple(rows),
        checkpoints=library | own,
        protocol=MaskingProtocol(**file.protocol.given()),
        **file.given("rows", "methods", "variants", "checkpoints", "protocol"),
    )


def parse_checkpoint(name: str, data: Any) -> Checkpoint:
    """Build a checkpoint from its entry in a YAML file."""
    return Checkpoint(name, **CheckpointEntry.read(f"checkpoint {name}", data).given())


def _expand_methods(where: str, methods: Iterable[Method], default_variants: tuple[str, ...]) -> list[PlanRow]:
    """Build the rows of each method's variants; its checkpoint `cosine` is the one with CosScale `alpha`."""
    rows = []
    for entry in methods:
        for variant in entry.variants or default_variants:
            if variant not in VARIANTS:
                raise ValueError(f"{where}: method: unknown variant {variant!r}{suggest(variant, VARIANTS)}")
            cosine, info = VARIANTS[variant]
            checkpoint = entry.cosine if cosine else entry.checkpoint
            if checkpoint is None:
                raise ValueError(f"{where}: method {entry.method}: missing {'cosine' if cosine else 'checkpoint'}")
            parts = [f"cosine:alpha={entry.alpha}"] if cosine else []
            parts += [entry.infoscale] if info else []
            rows.append(PlanRow(entry.method, variant, checkpoint, add_parts(entry.recipe, parts)))
    return rows


def override_plan(plan: MaskedPlan, lengths: str | None, positions: int | None, seeds: str | None) -> MaskedPlan:
    """Replace values of a plan by those of a command line; None leaves the plan's.

    Args:
        plan: The plan.
        lengths: Numbers separated by commas.
        positions: Masked positions of each document; 0 for all.
        seeds: Numbers separated by commas.
    """
    changes: dict[str, Any] = {}
    if lengths is not None:
        changes["lengths"] = parse_numbers("lengths", lengths)
    if seeds is not None:
        changes["seeds"] = parse_numbers("seeds", seeds, example="0,1,2")
    if positions is not None:
        changes["protocol"] = replace(plan.protocol, positions=positions or None)
    return replace(plan, **changes)


def plan_masked_evaluation(
    model: str, recipes: Iterable[str], lengths: str, positions: int, protocol: str
) -> MaskedPlan:
    """Plan the evaluation of one GAU-α model under several recipes.

    Args:
        model: Its folder.
        recipes: Texts of recipes, each a row.
        lengths: Numbers separated by commas.
        positions: Masked positions of each document; 0 for all.
        protocol: "single" or "random".
    """
    rows = tuple(PlanRow(recipe, "plain", "model", recipe) for recipe in recipes)
    return MaskedPlan(
        name="-".join(("evaluate", *Path(model).parts[-2:])).replace("/", ""),
        title=f"{Path(model).name} under {len(rows)} recipes",
        lengths=parse_numbers("lengths", lengths),
        rows=rows,
        checkpoints={"model": Checkpoint("model", path=model)},
        protocol=MaskingProtocol(protocol, positions=positions or None),
        train_length=read_config_as(GAUAlphaConfig, model).max_position_embeddings,
    )
