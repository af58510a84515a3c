"""`isentrope perplexity`: perplexity by position in long texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import app, disable_progress_bars, errors_in_one_line, expand_paths
from isentrope.cli.lengths import resolve_length
from isentrope.cli.options import (
    LENGTH_HELP,
    AsJson,
    CausalModel,
    CommandWithMoreData,
    Data,
    Device,
    Dtype,
    GgufFile,
    MaxDocuments,
    MoreData,
    Recipes,
    name_results,
    require_data,
)
from isentrope.cli.output import Output, exit_if_failed, summarize_results
from isentrope.utils.files import RERUN_REMEDY


@app.command(cls=CommandWithMoreData)
@errors_in_one_line()
def perplexity(
    model: CausalModel,
    recipe: Recipes,
    more_data: MoreData = None,
    data: Data = None,
    length: Annotated[str | None, typer.Option(help=LENGTH_HELP, show_default="4x")] = None,
    edges: Annotated[
        str | None,
        typer.Option(
            help="Edges of the buckets of positions, such as 0,4096,8192, instead of a length; by default two inside "
            "the training length, then its doublings."
        ),
    ] = None,
    documents: MaxDocuments = 8,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for perplexity.json, .png and .svg.", show_default="results/perplexity/MODEL-LENGTH"),
    ] = None,
    gguf_file: GgufFile = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure perplexity by position in long texts under each recipe. Results already in the folder are kept.

    isentrope perplexity MODEL --data book.txt --recipe plain --recipe rerope:window=4096+infoscale --length 4x
    """
    from isentrope.evaluation.loading import load_on_device, resolve_auto_for
    from isentrope.evaluation.perplexity import PerplexityConfig, measure_perplexity
    from isentrope.evaluation.results import list_failures, read_results
    from isentrope.evaluation.texts import load_texts
    from isentrope.report.figures.perplexity import draw_perplexity
    from isentrope.report.tables.perplexity import build_perplexity_table

    texts = require_data(data, more_data)
    config = PerplexityConfig.parse(["plain"], edges or _choose_edges(model, gguf_file, length))
    if edges and length:
        raise ValueError(f"edges, length: expected one of them, got {edges} and {length}")
    config = replace(config, recipes=resolve_auto_for(model, recipe, config.length, gguf_file))
    out = out or name_results("perplexity", model, config.length, gguf_file)
    disable_progress_bars()
    # texts are checked before a model is loaded
    documents_read = load_texts(expand_paths(texts), model, gguf_file, config.length, documents)
    loaded = load_on_device(model, device, dtype, gguf_file)
    with Output(as_json) as output:
        results = measure_perplexity(loaded, Path(model).name, documents_read, config, out)
        output.add(**summarize_results(read_results(results, RERUN_REMEDY)))
        output.print(build_perplexity_table(results))
        output.add_files([results, *draw_perplexity(results)])
        exit_if_failed(list_failures(results, config.recipes), results)


def _choose_edges(model: str, gguf_file: str | None, length: str | None) -> str:
    """Choose edges that follow the model: two buckets inside its training length, then doublings up to `length`."""
    from isentrope.evaluation.evaluate import choose_edges
    from isentrope.evaluation.loading import read_known_train_length

    trained = read_known_train_length(model, gguf_file)
    if trained is None and length is None:
        raise ValueError(f"length: {model} states no training length; add --length TOKENS, or --edges")
    tokens = resolve_length(length or "4x", model, gguf_file, trained)
    edges = [edge for edge in choose_edges(trained or tokens, tokens) if edge <= tokens]
    return ",".join(map(str, edges))
