"""Corpora."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.base import data, errors_in_one_line


@data.command()
def prepare(
    source: Annotated[
        str, typer.Argument(help="'sympy'; a file, a folder or a 'glob'; or owner/name, a data set on the hub.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for tokens, tokenizer, manifest.json, partition.png and .svg.")],
    tokenizer: Annotated[
        str, typer.Option(help="'characters' of the corpus, a BERT vocabulary (.txt), a folder, or a name on the hub.")
    ] = "characters",
    vocab_size: Annotated[
        int | None, typer.Option(help="Tokens of the tokenizer 'characters'; 12000 unless said.")
    ] = None,
    longer_than: Annotated[int, typer.Option(help="Keep documents of more tokens than this.")] = 4096,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    test: Annotated[int, typer.Option(help="Documents to test on.")] = 10,
    train_share: Annotated[float, typer.Option(help="Share of the documents to train on.")] = 0.8,
    features: Annotated[
        str | None, typer.Option(help="A model whose mean hidden states are clustered; else pairs of tokens are.")
    ] = None,
    column: Annotated[str, typer.Option(help="What holds the text, in JSON lines, Parquet and on the hub.")] = "text",
    subset: Annotated[str | None, typer.Option(help="Subset (configuration) of a data set on the hub.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of a data set on the hub; 'train' unless said.")] = None,
    data_files: Annotated[str | None, typer.Option(help="Files of a data set on the hub, as a 'glob'.")] = None,
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Warn of what cannot be read; go on.")] = False,
    limit: Annotated[int | None, typer.Option(help="Read only the first so many documents.")] = None,
) -> None:
    """Tokens of a corpus, parted into training, validation and test documents.

    Example: isentrope data prepare laws.jsonl.xz --tokenizer vocab.txt --out corpora/laws

    The same corpus, options and seed give the same partition. What an earlier run has done is kept.
    """
    with errors_in_one_line():
        from isentrope.data import prepare as study
        from isentrope.data.source import Source

        found = Source(source, column, subset, split, data_files, skip_broken, limit)
        options = study.PrepareOptions(tokenizer, vocab_size, longer_than, seed, test, train_share, features)
        show_partition(study.prepare(found, out, options, notify=lambda text: typer.echo(text, err=True)))


def show_partition(manifest: Path) -> None:
    from rich.console import Console

    from isentrope.report.figures import partition as corpus
    from isentrope.report.tables import terminal as tables

    Console().print(tables.partition(manifest))
    for path in (manifest, *corpus.partition(manifest)):
        typer.echo(path)
