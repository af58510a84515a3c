"""Write the plans that measure passkeys and needles under fitted laws: python docs/results/share/fitted.py [RESULTS]

Under each method the closed law and the pair that was fitted under it (RESULTS/*-calibrate/calibrate.json, by
default those beside this script); one plan a model and length, PLAN-fitted.yaml beside this script.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from isentrope.recipe import Recipe

HERE = Path(__file__).parent
FILLERS = (
    ", ".join(f"{kind}: {kind}-filler.jsonl" for kind in ("novels", "technical", "speeches")) + ", repetitive: null"
)
METHODS = ("", "-selfextend", "-leakyrerope", "-retrieval")  # in the folders' names; ReRoPE first, last with passkeys
# plan: the folders of its fits begin so, the model, times its training length of so many tokens, depths
PLANS = {
    "smollm2-32k": ("smollm2", "SmolLM2-135M-Instruct", 4, 8192, (0, 25, 50, 75)),
    "smollm2-131k": ("smollm2-131k", "SmolLM2-135M-Instruct", 16, 8192, (50,)),
    "tinyllama-8k": ("tinyllama", "TinyLlama-1.1B-Chat", 4, 2048, (0, 25, 50, 75)),
    "tinyllama-32k": ("tinyllama-32k", "TinyLlama-1.1B-Chat", 16, 2048, (0, 50)),
    "gemma-131k": ("gemma", "gemma-3-270m", 4, 32768, (0, 50)),
}


def read_recipes(path: Path) -> list[str]:
    """Read the method of a fit with the closed law and with the pair; nothing where it is not done."""
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if "candidates" not in data:
        return []
    fitted = {row["name"]: row["recipe"] for row in data["candidates"]}["scalar"]
    return [f"{data['recipe']}+share:beta=0.5", str(Recipe.from_dict(fitted))]


def write_plan(name: str, results: Path) -> None:
    prefix, model, times, trained, depths = PLANS[name]
    fits = [results / f"{prefix}{method}-calibrate" / "calibrate.json" for method in METHODS]
    recipes = list(dict.fromkeys(recipe for path in fits for recipe in read_recipes(path)))
    if not recipes:
        raise SystemExit(f"{results}: expected {prefix}-calibrate/calibrate.json of a finished fit, got none")
    lines = [
        f"# isentrope compare docs/results/share/{name}-fitted.yaml --model {model} --data texts --out results/share",
        f"title: Fitted laws, {model} at {times} times its training length of {trained} tokens",
        "retrieval:",
        "  tasks: [passkey, needle]",
        f"  lengths: [{times * trained}]",
        f"  ceiling: {trained}",
        f"  depths: [{', '.join(map(str, depths))}]",
        "  examples: 1",
        f"  texts: {{{FILLERS}}}",
        "recipes:",
        *(f'  - "{recipe}"' for recipe in recipes),
    ]
    (HERE / f"{name}-fitted.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for plan in PLANS:
        write_plan(plan, Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
