"""Options that several commands have, under one name each, and the names of the previous release."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from isentrope.cli.completion import complete_recipe
from isentrope.cli.output import print_error

T = TypeVar("T")
MAX_NAME = 80  # characters of a recipe in a file name
TEXTS_HELP = "Text: a file, a folder or a glob; .txt, .parquet, or .jsonl(.xz) with a 'text' on each line."
CORPUS_HELP = "A folder that 'isentrope data prepare' wrote."
LENGTH_HELP = "Tokens read of each document; 4x: times the training length."

CausalModel = Annotated[str, typer.Argument(help="A causal model: a folder, or a name on the hub.")]
Data = Annotated[list[str] | None, typer.Option("--data", help=f"{TEXTS_HELP} Repeat for several.")]
# a shell expands `--data *.txt` to one value and arguments; alone they are the previous release's spelling
MoreData = Annotated[list[str] | None, typer.Argument(hidden=True)]
Corpus = Annotated[Path | None, typer.Option("--data", help=CORPUS_HELP)]
Recipes = Annotated[
    list[str],
    typer.Option(
        help="A recipe to compare; 'plain' is the unchanged model. Repeat for several.", autocompletion=complete_recipe
    ),
]
MaxDocuments = Annotated[int, typer.Option(help="Use at most this many documents, the first that are long enough.")]
GgufFile = Annotated[str | None, typer.Option(help="A GGUF file in the model's folder.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32; auto: bfloat16 on a GPU, float32 on a CPU.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, …; auto: a GPU if there is one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else, on stdout.")]


class CommandWithMoreData(TyperCommand):
    """A command with `MoreData`, which its usage line leaves out."""

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        visible = [param for param in self.get_params(ctx) if not getattr(param, "hidden", False)]
        words = [self.options_metavar, *(word for param in visible for word in param.get_usage_pieces(ctx))]
        formatter.write_usage(ctx.command_path, " ".join(filter(None, words)))


def deprecated_option(*names: str) -> Any:
    """Declare a hidden option that has another name now."""
    return typer.Option(*names, hidden=True)


def join_data(data: Sequence[str] | None, more: Sequence[str] | None, old: str = "texts as arguments") -> list[str]:
    """Join the values of `--data` with arguments or those of an old option.

    Args:
        data: values of `--data`.
        more: further arguments, as a shell expands `--data *.txt`, or values of an old option.
        old: the old spelling, named in a notice if only that was used.
    """
    if more and (not data or old.startswith("-")):
        warn_deprecated(old, "--data")
    return [*(data or ()), *(more or ())]


def require_data(data: Sequence[str] | None, more: Sequence[str] | None = None) -> list[str]:
    """Join the values of `--data` as `join_data` does, and raise a ValueError if there is none."""
    joined = join_data(data, more)
    if not joined:
        raise ValueError("data: expected text, got none; add --data FILE, a folder or a glob")
    return joined


def prefer_new(value: T | None, old_value: T | None, old: str, new: str) -> T | None:
    """Return the value of an option that may have been given by its old name, with a notice if so."""
    if old_value is None:
        return value
    warn_deprecated(old, new)
    return old_value if value is None else value


def warn_deprecated(old: str, new: str) -> None:
    """Print the notice that an option has another name now."""
    print_error(f"{old}: deprecated, and gone in the next release; write {new}")


def name_results(command: str, model: str, length: int | str, gguf_file: str | None = None) -> Path:
    """Name the default folder of results: results/COMMAND/MODEL-LENGTH.

    Args:
        command: the command's name.
        model: a folder, or a name on the hub; of a path its last two parts name the model, as runs/base/best.
        length: the longest length, in tokens.
        gguf_file: a GGUF file in that folder, which is named too.
    """
    expanded = Path(model).expanduser()
    path = expanded.resolve() if expanded.is_dir() else Path(model)
    parts = [*path.parts[-2:], *([Path(gguf_file).stem] if gguf_file else []), str(length)]
    return Path("results") / command / "-".join(part.strip("/\\") for part in parts)


def name_recipe(recipe: str) -> str:
    """Turn a recipe's text into a part of a file name: rerope:window=64+share becomes rerope-window-64-share."""
    signed = re.sub(r"(?<=[=(,])-", "minus", recipe.lower())
    name = re.sub(r"[^a-z0-9.]+", "-", signed).strip("-")
    if len(name) <= MAX_NAME:
        return name
    return f"{name[:MAX_NAME]}-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}"  # tables of heads are long
