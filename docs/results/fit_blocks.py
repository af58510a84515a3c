"""Blocks of the page about laws for far keys: laws fitted to text, and registered claims about small Llamas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from share_blocks import FILLERS, HERE, MISSING, TABLES, join_lines, load_script

from isentrope.recipe import Recipe

SMALL_LLAMAS = load_script("small_llamas")
FITS = ("none", "infoscale", "logn", "power", "scalar", "layer", "head")
FIT_NAMES = {"infoscale": "InfoScale", "logn": "LogN", "power": "Power", "scalar": "**one fitted pair**"}
FIT_NAMES |= {"layer": "fitted by layer", "head": "fitted by head"}
FITTED_MODELS = {  # how the folders of their fits begin
    "the Llama that ships, 256 → 2048": "llama",
    "stories15M, 256 → 1024": "stories15M",
    "TinyLlama, 2048 → 8192": "tinyllama",
    "TinyLlama, 2048 → 32,768": "tinyllama-32k",
    "SmolLM2, 8192 → 32,768": "smollm2",
    "SmolLM2, 8192 → 131,072": "smollm2-131k",
    "Gemma-3-270M, 32,768 → 131,072": "gemma",
}
FITTED_METHODS = {"ReRoPE": "", "SelfExtend": "-selfextend", "Leaky ReRoPE": "-leakyrerope"}
WITH_PASSKEYS = {"ReRoPE": "-retrieval"}  # fitted with --with-retrieval
FITTED_PLANS = {  # with the answers of fitted laws: how the folders of its fits begin
    "smollm2-32k": ("SmolLM2 at 32,768", "smollm2"),
    "smollm2-131k": ("SmolLM2 at 131,072", "smollm2-131k"),
    "tinyllama-8k": ("TinyLlama at 8192", "tinyllama"),
    "tinyllama-32k": ("TinyLlama at 32,768", "tinyllama-32k"),
    "gemma-131k": ("Gemma-3-270M at 131,072", "gemma"),
}
FOUND_TITLES = ("plain inside", "closed law", "fitted pair", "γ", "perplexity", "−ln p for a token")
Answers = dict[tuple[str, str, float], tuple[int, float]]  # by filler, task and depth: whether found, -ln p of a token


def read_fit(folder: str) -> dict[str, Any] | None:
    """Read `calibrate.json` of a fit; None where it is not done."""
    path = HERE / "share" / f"{folder}-calibrate" / "calibrate.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def render_share_fits() -> str:
    """Print held-out perplexity beyond the training length against the closed law, of each fitted model and method."""
    titles = ["against `share`, held out", "β, γ of the pair", *(FIT_NAMES.get(name, name) for name in FITS)]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for model, prefix in FITTED_MODELS.items():
        for method, folder, data in list_fits(prefix):
            candidates: dict[str, dict[str, Any]] = {candidate["name"]: candidate for candidate in data["candidates"]}
            beta, gamma = data["fits"]["scalar"]["values"][0][0]
            links = f"[numbers]({folder}-calibrate/calibrate.json), [figure]({folder}-calibrate/calibrate.png)"
            cells = [f"{model}: {method} ({links})", f"{beta:.2f}, {gamma:.3f}".replace("-", "−")]
            for name in FITS:
                against = candidates.get(name, {}).get("against", {}).get("closed")
                values = [against[key][-1] for key in ("percent", "low", "high")] if against else []
                cells.append("{:+.2f} % ({:+.2f} to {:+.2f})".format(*values).replace("-", "−") if values else MISSING)
            lines.append(f"| {' | '.join(cells)} |")
    return join_lines(lines)


def list_fits(prefix: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """List the fits of a model that are done: method, how the folder begins, content of `calibrate.json`."""
    with_passkeys = {f"{method}, loss and passkeys": middle for method, middle in WITH_PASSKEYS.items()}
    for method, middle in (FITTED_METHODS | with_passkeys).items():
        if (data := read_fit(prefix + middle)) is not None:
            yield method, prefix + middle, data


def render_share_fits_found() -> str:
    """Print answers found under the closed law and under the pair fitted, and what else the pair changes."""
    lines = [f"| | {' | '.join(FOUND_TITLES)} |", "|---" * (1 + len(FOUND_TITLES)) + "|"]
    for plan, (name, prefix) in FITTED_PLANS.items():
        found = read_found(f"{plan}-fitted")
        for method, _, data in list_fits(prefix):
            pair = next(candidate for candidate in data["candidates"] if candidate["name"] == "scalar")
            gamma, percent = data["fits"]["scalar"]["values"][0][0][1], pair["against"]["closed"]["percent"][-1]
            closed, fitted = found[f"{data['recipe']}+share:beta=0.5"], found[str(Recipe.from_dict(pair["recipe"]))]
            rise = sum(loss - closed[place][1] for place, (_, loss) in fitted.items()) / len(fitted)
            counts = [count_found(answers) for answers in (found["plain"], closed, fitted)]
            numbers = [text.replace("-", "−") for text in (f"{gamma:.3f}", f"{percent:+.1f} %", f"{rise:+.2f}")]
            lines.append(f"| {name}: {method} | {' | '.join(counts + numbers)} |")
    return join_lines(lines)


def read_found(plan: str) -> dict[str, Answers]:
    """Read the answers under each recipe, of plans with one example in each place."""
    found: dict[str, Answers] = {}
    for filler in FILLERS:
        for cell in TABLES.read_cells(plan, f"{filler}-filler", "retrieval.json")[1]:
            place = filler, cell["task"], cell["depth"]
            found.setdefault(cell["recipe"], {})[place] = cell["forced"], -cell["logprob"]
    return found


def count_found(answers: Answers) -> str:
    return f"{sum(right for right, _ in answers.values())} of {len(answers)}"


def render_small_llamas() -> str:
    """Print what the small Llamas measured so far say of the registered claims."""
    return str(SMALL_LLAMAS.render_claims(HERE / "share" / "small-llamas"))
