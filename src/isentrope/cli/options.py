"""Options that several commands have."""

from typing import Annotated

import typer

CausalModel = Annotated[str, typer.Argument(help="A causal model: a folder, or a name on the hub.")]
Texts = Annotated[
    list[str],
    typer.Argument(help="Files, folders or globs: text, .parquet, or .jsonl(.xz) with a 'text' on each line."),
]
CORPUS_OPTION = typer.Option("--data", help="A folder that 'isentrope data prepare' wrote.")
Recipes = Annotated[
    list[str], typer.Option(help="A recipe to compare; 'plain' is the unchanged model. Repeat for several.")
]
MaxDocuments = Annotated[int, typer.Option(help="Use at most this many documents, the first that are long enough.")]
GgufFile = Annotated[str | None, typer.Option(help="A GGUF file in the model's folder.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32; auto: bfloat16 on a GPU, float32 on a CPU.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, …; auto: a GPU if there is one.")]
