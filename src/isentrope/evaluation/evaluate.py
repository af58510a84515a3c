"""Compare recipes of one causal model past its training length: which work, how well, and which is best."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from isentrope.data.tasks import SENTENCES, Haystack, load_filler
from isentrope.evaluation.loading import as_model, get_model_name, keep_mode, load_tokenizer, read_causal_config
from isentrope.evaluation.perplexity import PerplexityConfig, measure_perplexity
from isentrope.evaluation.prompts import PromptFormat
from isentrope.evaluation.ranking import Leaderboard, RankedRecipe, forgets, rank_recipes, select_best
from isentrope.evaluation.recipe_texts import PLAIN, under_recipe
from isentrope.evaluation.results import list_failures, write_results
from isentrope.evaluation.retrieval import RetrievalConfig, check_retrieval, measure_retrieval
from isentrope.evaluation.texts import Text, TextInput, collect_texts
from isentrope.hf.layer_plan import read_train_length

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Comparison:
    """What is measured of one model.

    Args:
        name: of the comparison.
        title: for reports.
        perplexity: recipes and buckets of positions.
        retrieval: tasks and lengths; None for none.
        skip_unsupported: leave out recipes that the model cannot be extended with, instead of raising.
    """

    name: str
    title: str
    perplexity: PerplexityConfig
    retrieval: RetrievalConfig | None = None
    skip_unsupported: bool = False


@dataclass(frozen=True)
class EvaluationInputs:
    """What a model reads: texts for perplexity; prompts and the texts that answers are hidden in for retrieval."""

    texts: Sequence[Text]
    prompts: PromptFormat | None = None
    haystacks: Mapping[str, Haystack] = field(default_factory=lambda: {SENTENCES: load_filler(SENTENCES)})


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`.

    Args:
        recipe: the best recipe by `select_best`; `plain` where none is better than the model as it is.
        leaderboard: all recipes, the lowest perplexity in the last bucket first.
        failures: why recipes have no numbers on some text, one line each.
        path: the folder with the results files; None where nothing was kept.
    """

    recipe: str
    leaderboard: Leaderboard
    failures: tuple[str, ...] = ()
    path: Path | None = None

    @property
    def rows(self) -> list[RankedRecipe]:
        return self.leaderboard["rows"]


def evaluate(
    model: str | Path | PreTrainedModel,
    texts: TextInput | Sequence[TextInput],
    recipes: Sequence[str] = (),
    length: int | str = "4x",
    *,
    retrieval: bool = False,
    documents: int = 8,
    out: str | Path | None = None,
) -> Evaluation:
    """Compare recipes of a causal model on your own texts, past its training length.

    Args:
        model: a loaded transformers model, or a folder or a name on the hub.
        texts: files, folders, globs, strings of text, or lists of token ids.
        recipes: texts of recipes, compared with the plain model; by default those worth trying on a rotary model.
        length: tokens read of each document; "4x" is four times the training length.
        retrieval: also measure retrieval of passkeys at that length.
        documents: at most this many, the first that are long enough.
        out: a folder for the results, from which the same call resumes; by default nothing is left on disk.

    Returns:
        The best recipe, and all of them ranked.

    Raises:
        ValueError: no text is long enough, or the model cannot be extended with a recipe.
    """
    config = read_causal_config(str(model)) if isinstance(model, str | Path) else model.config
    if config is None:
        raise ValueError(f"model: expected a causal one, got GAU-α in {model}; see isentrope evaluate")
    name = get_model_name(model)
    label = Path(name).name or config.model_type
    comparison = plan_comparison(config, label, recipes, length, retrieval)
    tokenized = collect_texts(texts, name, comparison.perplexity.length, documents)  # before a model is loaded
    inputs = EvaluationInputs(tokenized, PromptFormat.from_tokenizer(load_tokenizer(name)) if retrieval else None)
    with TemporaryDirectory() as temporary, keep_mode(loaded := as_model(model)):
        folder = Path(temporary if out is None else out)
        used, failures = compare_recipes(loaded, label, inputs, comparison, folder)
        board = rank_recipes(folder)
    best = select_best(board, used.perplexity.recipes) or PLAIN
    return Evaluation(best, board, tuple(failures), None if out is None else folder)


def plan_comparison(
    config: PreTrainedConfig, name: str, recipes: Sequence[str], length: int | str, passkeys: bool
) -> Comparison:
    """Plan a comparison with the plain model, by the training length in a model's config.

    Args:
        config: the model's.
        name: what the results call it.
        recipes: the usual ones where there are none.
        length: tokens, or as "4x" times the training length.
        passkeys: whether passkeys are tested.
    """
    text_config = config.get_text_config()
    # BLOOM and MPT name it otherwise
    trained = read_train_length(text_config) or getattr(text_config, "seq_length", None)
    trained = trained or getattr(text_config, "max_seq_len", None)
    if trained is None or trained < 4:
        raise ValueError(f"model: expected a config that states the training length, got {trained} in {name}")
    tokens = parse_length(str(length), trained)
    compared = tuple(dict.fromkeys((PLAIN, *(recipes or usual_recipes(trained, tokens)))))
    return Comparison(
        name=name,
        title=f"{name} at {tokens} tokens",
        perplexity=PerplexityConfig(compared, choose_edges(trained, tokens)),
        retrieval=RetrievalConfig(compared, ("passkey",), (tokens,), (0, 50, 100)) if passkeys else None,
        skip_unsupported=not recipes,
    )


def usual_recipes(trained: int, length: int) -> tuple[str, ...]:
    """List recipes worth trying on a rotary model: windows within its training length, factors that reach `length`."""
    half, most, factor = trained // 2, max(1, trained - 5), f"{length / trained:g}"
    # the smallest with which no distance exceeds three quarters of the training length, whose end is learned poorly
    group = next(g for g in count(1) if (length - 1) // g + half - half // g <= 3 * trained // 4)
    return (
        "infoscale",
        f"yarn:factor={factor}+yarntemperature:factor={factor}",
        f"rerope:window={half}",
        f"rerope:window={half}+share",
        f"selfextend:window={half},group={group}",
        f"selfextend:window={half},group={group}+share",
        f"sink:sinks=4,size={max(1, trained - 4)}",
        f"rerope:window={most}+lambda:sinks=5,window={most}",
    )


def parse_length(text: str, trained: int) -> int:
    """Parse a number of tokens, or one such as 4x, times the training length."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)[x×](?:train)?|(\d+)", text.strip())
    if match is None:
        raise ValueError(f"length: expected tokens such as 8192, or 4x the training length, got {text!r}")
    tokens = int(match[2]) if match[2] else int(float(match[1]) * trained)
    if tokens <= trained:
        raise ValueError(f"length: expected more than the training length of {trained} tokens, got {tokens}")
    return tokens


def choose_edges(trained: int, length: int) -> tuple[int, ...]:
    """Choose two buckets inside the training length, then doublings of it; the last is never a mere rest."""
    doubled = takewhile(lambda edge: 1.5 * edge <= length, (trained << n for n in count(1)))
    return tuple(sorted({0, trained // 2, trained, *doubled, length}))


def compare_recipes(
    model: PreTrainedModel,
    name: str,
    inputs: EvaluationInputs,
    comparison: Comparison,
    folder: Path,
    notify: Notify = lambda line: None,
) -> tuple[Comparison, list[str]]:
    """Measure what a folder does not have yet, and write `perplexity.json`, `retrieval.json` and `decoder.json`.

    Args:
        model: a causal model.
        name: what the results call it.
        inputs: what it reads.
        comparison: what is measured.
        folder: for the files.
        notify: called with each message: recipes left out, cells that failed.

    Returns:
        The comparison with the recipes that the model takes, and why cells failed, one line each.
    """
    check_learned_positions(model, comparison.perplexity.length)
    comparison = keep_supported(comparison, model, notify)
    retrieval, prompts = comparison.retrieval, inputs.prompts
    if retrieval is not None and prompts is not None:  # refused before anything is measured
        check_retrieval(model, prompts, inputs.haystacks, retrieval)
    recipes = comparison.perplexity.recipes
    path = measure_perplexity(model, name, inputs.texts, comparison.perplexity, folder)
    failures = list_failures(path, recipes)
    for line in dict.fromkeys(failures):
        notify(line)
    if retrieval is not None and prompts is not None:
        path = measure_retrieval(model, name, prompts, inputs.haystacks, retrieval, folder)
        more = list_failures(path, retrieval.recipes, retrieval.cells)
        for line in dict.fromkeys(more):
            notify(line)
        failures += more
    metadata = {"name": comparison.name, "title": comparison.title, "model": name, "recipes": list(recipes)}
    forgetful = [recipe for recipe in recipes if forgets(recipe)]
    write_results(folder / "decoder.json", metadata | {"forgetful": forgetful})
    return comparison, failures


def check_learned_positions(model: PreTrainedModel, length: int) -> None:
    """Raise a ValueError for a model with fewer learned position embeddings than `length`."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and re.search("pos|wpe", name) and module.num_embeddings < length:
            most, kind = module.num_embeddings, model.config.model_type
            raise ValueError(f"{kind}: expected a model that can read {length} tokens, got {most} learned positions")


def keep_supported(comparison: Comparison, model: PreTrainedModel, notify: Notify) -> Comparison:
    """Keep the recipes that the model can be extended with; the first refusal is raised unless those are skipped."""
    kept, skipped, error = list[str](), list[str](), None
    for recipe in comparison.perplexity.recipes:
        try:
            with under_recipe(model, recipe):
                kept.append(recipe)
        except ValueError as refusal:
            if not comparison.skip_unsupported:
                raise
            error = refusal
            skipped.append(f"left out {recipe}: {refusal}")
    if error is not None and kept == [PLAIN]:
        raise error
    for line in skipped:
        notify(line)
    retrieval = comparison.retrieval
    if retrieval is not None:
        retrieval = replace(retrieval, recipes=tuple(recipe for recipe in retrieval.recipes if recipe in kept))
    config = replace(comparison.perplexity, recipes=tuple(kept))
    return replace(comparison, perplexity=config, retrieval=retrieval)
