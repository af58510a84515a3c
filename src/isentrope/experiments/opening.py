"""What the demo opens with: a model far beyond its training length, plain and extended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isentrope.data.corpus import read_sympy_module
from isentrope.evaluation.loading import load_on_device, load_tokenizer, read_known_train_length, resolve_auto_for
from isentrope.evaluation.recipe_texts import PLAIN
from isentrope.evaluation.side_by_side import SideBySideConfig, compare_side_by_side
from isentrope.evaluation.texts import iterate_documents, tokenize_documents
from isentrope.experiments.checkpoints import SHIPPED_MODELS
from isentrope.recipe import auto
from isentrope.utils.parsing import is_multiple, parse_length

# among the best in docs/results/frontier/llama of the recipes that see all of the text, and fast; a test module
SHIPPED_LLAMA = "llama"
RECIPE = "rerope:window=128+share"
MODULE = "geometry/point.py"
SHIPPED_TIMES = 16  # of the training length, for the small Llama
OWN_TIMES = 4  # for a model of the user's, which is larger


@dataclass(frozen=True)
class Opening:
    """A model, a text and recipes to put side by side.

    Args:
        model: a folder, or a name on the hub.
        text: where the text is; None for a module of SymPy.
        config: recipes and lengths.
    """

    model: str
    text: str | None
    config: SideBySideConfig

    def run(
        self, out: Path, device: str = "auto", dtype: str = "auto", notify: Callable[[str], None] = lambda line: None
    ) -> Path:
        """Score and continue the text under each recipe.

        Args:
            out: the folder for `side_by_side.json`.
            device: such as cpu or cuda; auto is a GPU where there is one.
            dtype: bfloat16, float16 or float32; auto is bfloat16 on a GPU and float32 on a CPU.
            notify: called with a line as each recipe begins.

        Returns:
            The path of the file.
        """
        documents = iterate_documents(self.text) if self.text is not None else iter([read_sympy_module(MODULE)])
        tokenizer = load_tokenizer(self.model)
        wanted, length = self.config.length + self.config.new_tokens, self.config.length
        document = next(documents, None)
        if document is None:
            raise ValueError(f"data: expected a text, got none in {self.text}")
        # a text that ends where the model's own words begin is scored all the same
        size = min(wanted, max(length, _count_tokens(tokenizer, document.text or "")))
        (text,) = tokenize_documents([document], lambda: tokenizer, size, 1)
        if self.model == _shipped_llama() and dtype == "auto":
            dtype = "float32"  # its bfloat16 weights are slow on a CPU, and it is small
        loaded = load_on_device(self.model, device, dtype)
        return compare_side_by_side(loaded.eval(), tokenizer, text, self.config, out, notify)


def prepare_opening(
    model: str | None, text: str | None, recipes: Sequence[str] | None, length: int | str | None, new_tokens: int
) -> Opening:
    """Fill in what is not given, from the model that ships or from the training length of the one given.

    Args:
        model: a folder, or a name on the hub; the small Llama that ships by default.
        text: where a text is; a module of SymPy by default, with the small Llama alone.
        recipes: beside the plain model; "auto" by default, with the small Llama the best one measured on it.
        length: tokens to read, or as "4x" times the training length; "4x" by default, with the small Llama "16x".
        new_tokens: tokens to write after them.

    Raises:
        ValueError: a model is given without a text, or names no training length and no length in tokens is given.
    """
    times = OWN_TIMES
    if model is None:
        model, times = _shipped_llama(), SHIPPED_TIMES
        if not (Path(model) / "model.safetensors").exists():
            raise ValueError("model: the small Llama is not part of this installation; name a model of yours")
        recipes = recipes or [RECIPE]
    elif text is None:
        raise ValueError("--data TEXT: expected one with a model of your own, got none; add it")
    tokens = _count_length(model, f"{times}x" if length is None else str(length))
    compared = PLAIN, *resolve_auto_for(model, recipes or [auto.AUTO], tokens)
    return Opening(model, text, SideBySideConfig(compared, tokens, new_tokens))


def _count_length(model: str, length: str) -> int:
    return parse_length(length, read_known_train_length(model) if is_multiple(length) else None)


def _count_tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text)["input_ids"])


def _shipped_llama() -> str:
    return str(SHIPPED_MODELS / SHIPPED_LLAMA)
