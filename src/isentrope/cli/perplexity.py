"""`isentrope perplexity`: perplexity by position in long texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import app, disable_progress_bars, errors_in_one_line, expand_paths
from isentrope.cli.options import CausalModel, Device, Dtype, GgufFile, MaxDocuments, Recipes, Texts
from isentrope.cli.output import exit_if_failed, print_paths, print_table


@app.command()
@errors_in_one_line()
def perplexity(
    model: CausalModel,
    texts: Texts,
    recipe: Recipes,
    edges: Annotated[
        str, typer.Option(help="Edges of the buckets of positions; the last is the number of tokens read per document.")
    ] = "0,4096,8192,12288,16384,24576,32768",
    documents: MaxDocuments = 8,
    out: Annotated[Path, typer.Option(help="Folder for perplexity.json, .png and .svg.")] = Path("results/perplexity"),
    gguf_file: GgufFile = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Measure perplexity by position in long texts under each recipe. Results already in the folder are kept.

    isentrope perplexity MODEL book.txt --recipe plain --recipe rerope:window=4096+infoscale
    """
    from isentrope.evaluation.loading import load_on_device, resolve_auto_for
    from isentrope.evaluation.perplexity import PerplexityConfig, measure_perplexity
    from isentrope.evaluation.results import list_failures
    from isentrope.evaluation.texts import load_texts
    from isentrope.report.figures.perplexity import draw_perplexity
    from isentrope.report.tables.perplexity import build_perplexity_table

    config = PerplexityConfig.parse(["plain"], edges)
    config = replace(config, recipes=resolve_auto_for(model, recipe, config.length, gguf_file))
    disable_progress_bars()
    # texts are checked before a model is loaded
    documents_read = load_texts(expand_paths(texts), model, gguf_file, config.length, documents)
    loaded = load_on_device(model, device, dtype, gguf_file)
    results = measure_perplexity(loaded, Path(model).name, documents_read, config, out)
    print_table(build_perplexity_table(results))
    print_paths([results, *draw_perplexity(results)])
    exit_if_failed(list_failures(results, config.recipes), results)
