"""`isentrope retrieval`: passkeys, needles and other facts hidden in long texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import app, disable_progress_bars, errors_in_one_line, expand_paths
from isentrope.cli.options import CausalModel, Device, Dtype, GgufFile, Recipes
from isentrope.cli.output import exit_if_failed, print_paths, print_table


@app.command()
@errors_in_one_line()
def retrieval(
    model: CausalModel,
    recipe: Recipes,
    tasks: Annotated[
        str, typer.Option(help="Of passkey, needle, multikey, multivalue, variables, words; separated by commas.")
    ] = "passkey,needle",
    lengths: Annotated[
        str, typer.Option(help="Tokens of an example, with its question and answer.")
    ] = "1024,2048,4096",
    depths: Annotated[
        str, typer.Option(help="Percent of the text before the hidden fact (passkey, needle, multikey).")
    ] = "0,25,50,75,100",
    examples: Annotated[int, typer.Option(help="Examples for each task, length and depth.")] = 4,
    text: Annotated[
        list[str] | None, typer.Option(help="Files to hide facts in; by default a few plain sentences, repeated.")
    ] = None,
    chat: Annotated[
        bool | None, typer.Option(help="Ask in the tokenizer's chat template; by default if it has one.")
    ] = None,
    score: Annotated[
        str, typer.Option(help="forced: the likelihood of the answer; both: also the model's own reply.")
    ] = "both",
    seed: Annotated[int, typer.Option(help="Seed of the examples.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for retrieval.json and heatmaps.")] = Path("results/retrieval"),
    gguf_file: GgufFile = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Test which facts a model retrieves from long texts under each recipe. Results already in the folder are kept.

    isentrope retrieval MODEL --recipe plain --recipe rerope:window=4096+infoscale --lengths 4096,8192,16384

    isentrope retrieval MODEL --recipe plain --tasks multikey,variables,words --text book.txt --score forced
    """
    from isentrope.evaluation.loading import load_on_device, load_tokenizer
    from isentrope.evaluation.results import list_failures
    from isentrope.evaluation.retrieval import PromptFormat, RetrievalConfig, load_haystack, measure_retrieval
    from isentrope.report.figures.retrieval import draw_heatmaps
    from isentrope.report.tables.retrieval import build_retrieval_table

    config = RetrievalConfig.parse(recipe, tasks, lengths, depths, examples=examples, seed=seed, score=score)
    disable_progress_bars()
    haystack = load_haystack(expand_paths(text or []))
    loaded = load_on_device(model, device, dtype, gguf_file)
    prompts = PromptFormat.from_tokenizer(load_tokenizer(model, gguf_file), chat)
    results = measure_retrieval(loaded, Path(model).name, prompts, haystack, config, out)
    print_table(build_retrieval_table(results))
    print_paths([results, *draw_heatmaps(results)])
    exit_if_failed(list_failures(results, config.recipes, config.cells), results)
