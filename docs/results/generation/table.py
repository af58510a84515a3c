"""Write the README's table from the raw files of docs/results: python docs/results/generation/table.py [--check]

What stands between the marks `start:table` and `end:table` is replaced: SmolLM2-135M at 32,768 tokens, four times its
training length, as `isentrope compare` measured it (docs/results/frontier/smollm2-32k). The last row is what `auto`
chooses for that model and length.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from isentrope.evaluation.frontier import build_board

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "results"
SECTION = re.compile(r"(\[start:table\] -->\n)(.*?)(<!-- --8<-- \[end)", re.DOTALL)
ROWS = {
    "plain": "as it is",
    "yarn:factor=4+yarntemperature:factor=4": "YaRN ×4",
    "rerope:window=4096+share:beta=0.5": "`rerope:window=4096+share`",
    "rerope:window=4096+retrieve:blocks=16,size=128+share:beta=0.5": "`auto`",
}


def main() -> None:
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = SECTION.sub(lambda match: match[1] + render() + match[3], old)
    if "--check" in sys.argv and new != old:
        raise SystemExit("README.md: its table differs from docs/results; run docs/results/generation/table.py")
    readme.write_text(new, encoding="utf-8")


def render() -> str:
    """Render the table: perplexity at the end of two kinds of text, and passkeys found, recipe by recipe."""
    board = build_board(RESULTS / "frontier" / "smollm2-32k")
    ceiling, last = board["ceiling"], {row["recipe"]: row for row in board["rows"]}
    lines = [
        "| SmolLM2-135M (4-bit GGUF), trained to 8,192 tokens | perplexity: novel | technical text | passkeys found |",
        "|---|---|---|---|",
        format_row("inside its length", ceiling["perplexity"], count_found(ceiling["retrieved"])),
    ]
    for recipe, name in ROWS.items():
        row = last[recipe]
        texts = {kind: row["perplexity"][kind][-1] for kind in ("novels", "technical")}
        lines.append(format_row(f"at 32,768: {name}", texts, count_found(row["retrieved"])))
    return "\n".join(lines) + "\n"


def format_row(name, perplexity, found) -> str:
    numbers = (
        f"{perplexity[kind]:,.0f}" if perplexity[kind] > 1000 else f"{perplexity[kind]:.1f}"
        for kind in ("novels", "technical")
    )
    return f"| {name} | {' | '.join(numbers)} | {found} |"


def count_found(answers) -> str:
    return f"{answers['hits']:.0f} of {answers['count']}"


if __name__ == "__main__":
    main()
