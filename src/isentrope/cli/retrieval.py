"""`isentrope retrieval`: passkeys, needles and other facts hidden in long texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import app, disable_progress_bars, errors_in_one_line, expand_paths
from isentrope.cli.lengths import resolve_lengths
from isentrope.cli.options import (
    AsJson,
    CausalModel,
    Device,
    Dtype,
    GgufFile,
    Recipes,
    deprecated_option,
    join_data,
    name_results,
)
from isentrope.cli.output import Output, exit_if_failed, summarize_results
from isentrope.utils.files import RERUN_REMEDY


@app.command()
@errors_in_one_line()
def retrieval(
    model: CausalModel,
    recipe: Recipes,
    tasks: Annotated[
        str,
        typer.Option(
            help="Tasks separated by commas: passkey, needle, multikey, multivalue, variables, words, fourneedles, "
            "facts1, facts2, RULER's niah_…, vt, cwe, fwe; or the groups ruler, niah, babilong, all."
        ),
    ] = "passkey,needle",
    lengths: Annotated[
        str,
        typer.Option(help="Tokens of an example, with its question and answer; 4x: times the training length."),
    ] = "2x,4x",
    depths: Annotated[
        str, typer.Option(help="Percent of the text before the hidden fact, for tasks with one.")
    ] = "0,25,50,75,100",
    examples: Annotated[int, typer.Option(help="Examples for each task, length, depth and filler.")] = 4,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", help="Text to hide facts in, all of it as one filler; --filler has several."),
    ] = None,
    text: Annotated[list[str] | None, deprecated_option("--text")] = None,
    filler: Annotated[
        list[str] | None,
        typer.Option(
            help="sentences (the default), noise, needles, python, or NAME=FILE. Repeat for several: results are kept "
            "for each."
        ),
    ] = None,
    ceiling: Annotated[
        bool, typer.Option(help="Also measure the plain model inside its training length, where that is known.")
    ] = True,
    chat: Annotated[
        bool | None, typer.Option(help="Ask in the tokenizer's chat template; by default if it has one.")
    ] = None,
    score: Annotated[
        str, typer.Option(help="forced: the likelihood of the answer; both: also the model's own reply.")
    ] = "both",
    seed: Annotated[int, typer.Option(help="Seed of the examples.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for retrieval.json and heatmaps.", show_default="results/retrieval/MODEL-LENGTH"),
    ] = None,
    gguf_file: GgufFile = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Test which facts a model retrieves from long texts under each recipe. Results already in the folder are kept.

    isentrope retrieval MODEL --recipe plain --recipe rerope:window=4096+infoscale --lengths 2x,4x

    isentrope retrieval MODEL --recipe plain --tasks ruler --filler noise --filler python --filler book=book.txt

    isentrope retrieval MODEL --recipe plain --tasks multikey,variables,words --data book.txt --score forced
    """
    from isentrope.data.tasks import SENTENCES, load_fillers, parse_fillers
    from isentrope.data.tasks.fillers import TEXT
    from isentrope.evaluation.loading import load_on_device, load_tokenizer, resolve_auto_for
    from isentrope.evaluation.prompts import PromptFormat
    from isentrope.evaluation.results import list_failures, read_results
    from isentrope.evaluation.retrieval import RetrievalConfig, measure_retrieval
    from isentrope.hf.train_length import read_train_length
    from isentrope.report.figures.retrieval import draw_heatmaps
    from isentrope.report.tables.retrieval import build_retrieval_table

    named = parse_fillers(filler or [], lambda path: expand_paths([path]))
    if texts := join_data(data, text, "--text"):
        named = {TEXT: tuple(expand_paths(texts)), **named}
    named = named or {SENTENCES: None}
    tokens = resolve_lengths("lengths", lengths, model, gguf_file)
    out = out or name_results("retrieval", model, max(tokens), gguf_file)
    config = RetrievalConfig.parse(
        resolve_auto_for(model, recipe, max(tokens), gguf_file),
        tasks,
        ",".join(map(str, tokens)),
        depths,
        examples=examples,
        seed=seed,
        score=score,
        fillers=tuple(named),
    )
    disable_progress_bars()
    haystacks = load_fillers(named)
    loaded = load_on_device(model, device, dtype, gguf_file)
    if ceiling:
        config = replace(config, ceiling=read_train_length(loaded.config.get_text_config()))
    prompts = PromptFormat.from_tokenizer(load_tokenizer(model, gguf_file), chat)
    with Output(as_json) as output:
        results = measure_retrieval(loaded, Path(model).name, prompts, haystacks, config, out)
        output.add(**summarize_results(read_results(results, RERUN_REMEDY)))
        output.print(build_retrieval_table(results))
        output.add_files([results, *draw_heatmaps(results)])
        exit_if_failed(list_failures(results, config.recipes, config.cells), results)
