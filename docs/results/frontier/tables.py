"""Write the tables of README.md from the raw files beside this script: python docs/results/frontier/tables.py

`isentrope compare` writes the raw files, a folder for each plan. What stands in README.md between `<!-- NAME -->` and
`<!-- end -->` is replaced: the leaderboard and figure of the plan NAME, or for `summary` every method on every model.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from isentrope.evaluation.frontier import ComparedRecipe, ComparisonBoard, Retrieved, build_board
from isentrope.report.html.comparison import find_comparison_folders, write_comparison
from isentrope.utils.files import write_atomically

HERE = Path(__file__).parent
SUMMARY = "summary"
NOT_MEASURED = "Not measured yet."
SECTION = re.compile(r"(<!-- (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE, help="folder of README.md and the raw files")
    folder = parser.parse_args().folder
    boards: dict[str, ComparisonBoard] = {}
    for path in find_comparison_folders(folder):
        write_comparison(path)
        boards[path.name] = build_board(path)
    readme = folder / "README.md"
    text = SECTION.sub(lambda match: match[1] + render(match[2], boards, folder) + match[4], readme.read_text("utf-8"))
    with write_atomically(readme) as partial:
        partial.write_text(text, encoding="utf-8")
    print(f"{readme}: {len(boards)} plans measured")


def render(name: str, boards: dict[str, ComparisonBoard], folder: Path) -> str:
    """Render one section, with a blank line at its end."""
    if name == SUMMARY:
        return render_summary(boards) if boards else f"{NOT_MEASURED}\n"
    if name not in boards:
        return f"{NOT_MEASURED}\n"
    table = (folder / name / "leaderboard.md").read_text(encoding="utf-8")
    figure = f"![Retrieval against perplexity, {boards[name]['title']}]({name}/frontier.png)\n\n"
    return (figure if (folder / name / "frontier.png").is_file() else "") + table


def render_summary(boards: dict[str, ComparisonBoard]) -> str:
    """Render answers found and the ratio of perplexity of every method on every model; bold is on the front."""
    cells: dict[str, dict[str, str]] = {}
    for name, board in boards.items():
        for row in board["rows"]:
            cells.setdefault(name_method(row["recipe"]), {}).setdefault(name, format_cell(row))  # the best of its name
    lines = [["method", *boards], ["---"] * (1 + len(boards))]
    lines += [[f"`{method}`", *(row.get(name, "") for name in boards)] for method, row in cells.items()]
    own = [format_ceiling(board) for board in boards.values()]
    lines.append(["*plain inside its length*", *own])
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{table}\nAnswers found · perplexity in the last bucket relative to the plain model inside its length.\n"


def name_method(recipe: str) -> str:
    """A recipe without the numbers that differ between models: `rerope + retrieve votes`."""
    parts = [part.partition(":") for part in recipe.split("+")]
    return " + ".join(name + (" votes" if "score=votes" in options else "") for name, _, options in parts)


def format_cell(row: ComparedRecipe) -> str:
    text = f"{format_answers(row['retrieved'])} · {'–' if row['ratio'] is None else format(row['ratio'], '.3g')}"
    return f"**{text}**" if row["front"] else text


def format_ceiling(board: ComparisonBoard) -> str:
    return f"{format_answers(board['ceiling']['retrieved'])} · 1"


def format_answers(answers: Retrieved | None) -> str:
    return "–" if answers is None else f"{answers['hits']:.3g} of {answers['count']}"


if __name__ == "__main__":
    main()
