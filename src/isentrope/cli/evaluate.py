"""`isentrope evaluate`: which recipe works best for a model on your own text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import app, errors_in_one_line
from isentrope.cli.completion import complete_recipe
from isentrope.cli.options import (
    AsJson,
    CommandWithMoreData,
    Device,
    Dtype,
    GgufFile,
    MaxDocuments,
    MoreData,
    join_data,
)
from isentrope.cli.output import Output, print_progress
from isentrope.cli.plans import run_causal_plan, run_masked_plans

# options that only one kind of model has
CAUSAL_OPTIONS = ("length", "retrieval", "documents", "save", "allow_forgetting", "gguf_file", "dtype", "device")
GAU_OPTIONS = ("lengths", "positions", "protocol")


@app.command(cls=CommandWithMoreData)
@errors_in_one_line()
def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A causal model or GAU-α: a folder, or a name on the hub.")],
    more_data: MoreData = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Text: a file, folder or glob; repeat for several. GAU-α: a folder of 'isentrope data prepare'."
        ),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="A recipe to compare, or auto; repeat for several. Causal models have a default selection.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    length: Annotated[str, typer.Option(help="Tokens read of each document; 4x: times the training length.")] = "4x",
    retrieval: Annotated[
        bool | None,
        typer.Option(
            "--retrieval/--no-retrieval",
            help="Hide six passkeys in your text at that length; by default where the model has a tokenizer.",
            show_default=False,
        ),
    ] = None,
    documents: MaxDocuments = 8,
    save: Annotated[
        Path | None,
        typer.Option(help="A new folder for the model with the best recipe that can reach all of the text."),
    ] = None,
    allow_forgetting: Annotated[
        bool,
        typer.Option("--allow-forgetting", help="Save a recipe that sees a window of the text alone, if it is best."),
    ] = False,
    lengths: Annotated[str, typer.Option(help="GAU-α: lengths in tokens.")] = "128,256,512,1024,2048,4096",
    positions: Annotated[int, typer.Option(help="GAU-α: masked positions per document; 0 for all.")] = 256,
    protocol: Annotated[
        str, typer.Option(help="GAU-α: single, one token masked at a time; random, 15 % at once.")
    ] = "single",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; by default results/evaluate, for GAU-α results.")
    ] = None,
    gguf_file: GgufFile = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Find the recipe that works best for a model past its training length, on your own text.

    For a causal model: perplexity by position, passkeys, and with --save the model with the best recipe of those that
    can reach all of the text: the lowest perplexity at the end among those that find no fewer passkeys, are better
    there than the plain model and cost at most 0.5 % inside its training length. A recipe is called best where a 95 %
    interval, paired over documents, says so. For GAU-α: perplexity and accuracy of masked tokens.
    Results already in the folder are kept.

    isentrope evaluate MODEL --data books --save longer

    isentrope evaluate runs/base/best --data data/laws --recipe rope --recipe rope+infoscale:count=sequence
    """
    from isentrope.evaluation.loading import (
        check_not_extended,
        check_save_folder,
        read_causal_config,
        save_extended,
    )
    from isentrope.evaluation.ranking import MAX_DEGRADATION_PERCENT, choose_best, forgets, rank_recipes
    from isentrope.experiments.causal_plan import plan_causal_evaluation
    from isentrope.experiments.masked_plan import plan_masked_evaluation
    from isentrope.report.tables.leaderboard import build_card_rows

    data = join_data(data, more_data)
    if not data:
        raise ValueError(
            "data: expected text for a causal model, or a prepared corpus for GAU-α, got none; add --data books"
        )
    config = read_causal_config(model, gguf_file)
    if config is None:
        _reject_options(context, CAUSAL_OPTIONS, "GAU-α")
        if not recipe or len(data) > 1:
            raise ValueError(f"recipe, data: expected recipes and one corpus for GAU-α, got {recipe} and {data}")
        masked_plan = plan_masked_evaluation(model, recipe, lengths, positions, protocol)
        with Output(as_json) as output:
            complete = run_masked_plans([masked_plan], out or Path("results"), Path(data[0]), output)
        raise typer.Exit(0 if complete else 1)
    _reject_options(context, GAU_OPTIONS, config.model_type)
    check_save_folder(save)
    if gguf_file is None:
        check_not_extended(model, recipe or ["auto"])
    decoder = {"model": model, "gguf_file": gguf_file, "dtype": dtype, "device": device}
    plan = plan_causal_evaluation(decoder, config, data, recipe or [], length, documents, retrieval)
    out = out or Path("results/evaluate")
    with Output(as_json) as output:
        complete = run_causal_plan(plan, out, output)
        if save is not None:
            recipes = plan.perplexity.recipes
            forgetful = [] if allow_forgetting else [text for text in recipes if forgets(text)]
            choice = choose_best(rank_recipes(out / plan.name), recipes, forgetful)
            if choice is None:
                raise ValueError(
                    "save: no recipe that sees all of the text is better at the end and costs "
                    f"{MAX_DEGRADATION_PERCENT} % or less inside the training length; isentrope.extend and "
                    "save_pretrained save a model with any recipe"
                )
            rows = build_card_rows(out / plan.name, choice.recipe)
            print_progress(f"saving with {choice.recipe}")
            output.add(saved_recipe=choice.recipe)
            output.add_files([save_extended(plan.decoder["model"], choice.recipe, save, gguf_file, rows)])
    raise typer.Exit(0 if complete else 1)


def _reject_options(context: typer.Context, names: tuple[str, ...], kind: str) -> None:
    """Raise if the command line has an option that would have no effect."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ValueError(f"--{name.replace('_', '-')}: not for a model of type {kind}")
