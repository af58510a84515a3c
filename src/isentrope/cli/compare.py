"""`isentrope compare`: many recipes on one causal model, on several kinds of text, as a leaderboard."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import app, disable_progress_bars, errors_in_one_line
from isentrope.cli.options import AsJson, deprecated_option, prefer_new
from isentrope.cli.output import Output, print_progress
from isentrope.cli.plans import print_comparison


@app.command()
@errors_in_one_line()
def compare(
    plan: Annotated[Path, typer.Argument(help="A YAML file; docs/results/frontier has some.")],
    model: Annotated[str, typer.Option(help="A causal model: a folder, or a name on the hub.")],
    data: Annotated[
        Path | None, typer.Option("--data", help="The folder of the plan's texts.", show_default="texts")
    ] = None,
    texts: Annotated[Path | None, deprecated_option("--texts")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results; plans share it.")] = Path("results/compare"),
    seconds: Annotated[float, typer.Option(min=0, help="Stop before so many have passed; run again to resume.")] = (
        math.inf
    ),
    only: Annotated[
        str | None,
        typer.Option(
            help="perplexity, retrieval or time; the first two by default. time: a pass of every recipe over one "
            "text, to be run alone, with nothing else on the device."
        ),
    ] = None,
    kinds: Annotated[str | None, typer.Option(help="Kinds of text, separated by commas; all by default.")] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="Leave out recipes with this in their text. Repeat for several.")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that prepare prompts meanwhile, on Linux.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Compare recipes on one causal model: perplexity by position, retrieval by filler, time and memory.

    Breadth first: every recipe on one document of each kind, then on the next. What the folder has is kept. The exit
    status is 1 where a recipe failed.

    isentrope compare docs/results/frontier/smollm2-32k.yaml --model SmolLM2-135M-Instruct --data texts --seconds 150
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the processes are forked
    from isentrope.evaluation.loading import check_not_extended
    from isentrope.evaluation.recipe_texts import check_recipes
    from isentrope.evaluation.results import PERPLEXITY
    from isentrope.experiments.comparison_plan import PARTS, TIME, load_comparison
    from isentrope.experiments.comparison_runner import Outcome, has_results, run_comparison
    from isentrope.report.figures.perplexity import draw_perplexity
    from isentrope.report.html.comparison import write_comparison
    from isentrope.report.html.page import write_page

    if only not in (None, *PARTS, TIME):
        raise ValueError(f"only: expected {', '.join(PARTS)} or {TIME}, got {only!r}")
    narrowed = load_comparison(plan).select(only, kinds.split(",") if kinds else (), without or ())
    check_recipes(narrowed.recipes)  # a misspelt one is refused before any work
    check_not_extended(model, narrowed.recipes)
    disable_progress_bars()
    folder = out / narrowed.name
    data = prefer_new(data, texts, "--texts", "--data") or Path("texts")
    with Output(as_json) as output:
        outcome = run_comparison(narrowed, model, data, out, seconds, workers, print_progress)
        output.add(outcome=outcome.name.lower())
        if has_results(folder):
            written = write_comparison(folder)
            for results in sorted(folder.glob(f"*/{PERPLEXITY.file}")):
                written += draw_perplexity(results)
            print_comparison(folder, output)
            output.add_files([*written, write_page(folder)])
    raise typer.Exit(1 if outcome is Outcome.FAILED else 0)
