"""`isentrope data`: corpora to train and evaluate on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import app, errors_in_one_line
from isentrope.cli.options import AsJson
from isentrope.cli.output import Output, print_progress
from isentrope.utils.files import RERUN_REMEDY, read_json

data = typer.Typer(no_args_is_help=True, help="Corpora to train and evaluate on.")
app.add_typer(data, name="data")


@data.command()
@errors_in_one_line()
def prepare(
    source: Annotated[
        str, typer.Argument(help="'sympy'; a file, a folder or a 'glob'; or owner/name, a dataset on the hub.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for tokens, tokenizer, manifest.json, partition.png and .svg.")],
    tokenizer: Annotated[
        str, typer.Option(help="'characters' of the corpus, a BERT vocabulary (.txt), a folder, or a name on the hub.")
    ] = "characters",
    vocab_size: Annotated[
        int | None, typer.Option(help="Vocabulary size of the tokenizer 'characters'; 12000 by default.")
    ] = None,
    longer_than: Annotated[int, typer.Option(help="Keep documents with more tokens than this.")] = 4096,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    test: Annotated[int, typer.Option(help="Number of test documents.")] = 10,
    train_share: Annotated[float, typer.Option(help="Share of the documents to train on.")] = 0.8,
    features: Annotated[
        str | None,
        typer.Option(help="A model whose mean hidden states are clustered; by default bigram counts are."),
    ] = None,
    column: Annotated[
        str, typer.Option(help="The field with the text, in JSON lines, Parquet and on the hub.")
    ] = "text",
    subset: Annotated[str | None, typer.Option(help="Subset (configuration) of a dataset on the hub.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of a dataset on the hub; 'train' by default.")] = None,
    data_files: Annotated[str | None, typer.Option(help="Files of a dataset on the hub, as a 'glob'.")] = None,
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Warn about unreadable documents and skip them.")
    ] = False,
    limit: Annotated[int | None, typer.Option(help="Read only this many documents, the first.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tokenize a corpus and split it into training, validation and test documents.

    Example: isentrope data prepare laws.jsonl.xz --tokenizer vocab.txt --out corpora/laws

    The same corpus, options and seed give the same partition. What an earlier run has done is kept.
    """
    from isentrope.data import prepare as preparation
    from isentrope.data.source import Source

    corpus = Source(source, column, subset, split, data_files, skip_broken, limit)
    options = preparation.PrepareOptions(tokenizer, vocab_size, longer_than, seed, test, train_share, features)
    with Output(as_json) as output:
        print_partition(preparation.prepare(corpus, out, options, notify=print_progress), output)


def print_partition(manifest: Path, output: Output) -> None:
    """Print the table of a partition, draw its figure and print the paths of both files."""
    from isentrope.report.figures.partition import draw_partition
    from isentrope.report.tables.partition import build_partition_table

    content = read_json(manifest, RERUN_REMEDY)
    output.add(**{key: content[key] for key in ("statistics", "counts", "near_duplicates")})
    output.print(build_partition_table(manifest))
    output.add_files([manifest, *draw_partition(manifest)])
