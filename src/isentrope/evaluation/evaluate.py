"""Compare recipes of one causal model past its training length: which work, how well, and which is best."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from isentrope.data.tasks import SENTENCES, Haystack, load_filler
from isentrope.evaluation.cost import estimate_cost
from isentrope.evaluation.loading import as_model, get_model_name, keep_mode, load_tokenizer, read_causal_config
from isentrope.evaluation.perplexity import PerplexityConfig, measure_perplexity
from isentrope.evaluation.prompts import PromptFormat
from isentrope.evaluation.ranking import Leaderboard, RankedRecipe, choose_best, forgets, rank_recipes
from isentrope.evaluation.recipe_texts import PLAIN, under_recipe
from isentrope.evaluation.results import list_failures, write_results
from isentrope.evaluation.retrieval import RetrievalConfig, check_retrieval, measure_retrieval
from isentrope.evaluation.texts import Text, TextInput, check_vocabulary, collect_texts, iterate_documents
from isentrope.hf.auto import resolve_auto
from isentrope.hf.train_length import read_train_length
from isentrope.recipe import Recipe, auto
from isentrope.utils.parsing import parse_length

Notify = Callable[[str], None]
PASSKEY_DEPTHS = (0, 20, 40, 60, 80, 100)  # percent of the text before a passkey; one at each


@dataclass(frozen=True)
class Comparison:
    """What is measured of one model.

    Args:
        name: of the comparison.
        title: for reports.
        perplexity: recipes and buckets of positions.
        retrieval: tasks and lengths; None for none.
        skip_unsupported: leave out recipes that the model cannot be extended with, instead of raising.
        optional_retrieval: leave retrieval out where it cannot be measured, instead of raising.
    """

    name: str
    title: str
    perplexity: PerplexityConfig
    retrieval: RetrievalConfig | None = None
    skip_unsupported: bool = False
    optional_retrieval: bool = False


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
        recipe: the one that `choose_best` chooses; `plain` where none is better than the model as it is.
        leaderboard: all recipes, the lowest perplexity in the last bucket first.
        failures: why recipes have no numbers on some text, one line each.
        path: the folder with the results files; None where nothing was kept.
        ties: recipes that cannot be told from the chosen one by a 95 % interval, paired over texts.
    """

    recipe: str
    leaderboard: Leaderboard
    failures: tuple[str, ...] = ()
    path: Path | None = None
    ties: tuple[str, ...] = ()

    @property
    def rows(self) -> list[RankedRecipe]:
        return self.leaderboard["rows"]


def evaluate(
    model: str | Path | PreTrainedModel,
    texts: TextInput | Sequence[TextInput],
    recipes: str | Recipe | Sequence[str | Recipe] = (),
    length: int | str = "4x",
    *,
    retrieval: bool | None = None,
    documents: int = 8,
    out: str | Path | None = None,
) -> Evaluation:
    """Compare recipes of a causal model on your own texts, past its training length.

    Args:
        model: a loaded transformers model, or a folder or a name on the hub.
        texts: files, folders, globs, strings of text, or lists of token ids.
        recipes: one or several, or "auto", compared with the plain model; by default those worth trying on a rotary
            model. One that forgets text is measured, but never chosen.
        length: tokens read of each document; "4x" is four times the training length.
        retrieval: also hide passkeys in the texts, at that length; by default where the model has a tokenizer.
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
    given = [recipes] if isinstance(recipes, str | Recipe) else recipes
    comparison = plan_comparison(config, label, [str(recipe) for recipe in given], length, retrieval)
    tokenized = collect_texts(texts, name, comparison.perplexity.length, documents)  # before a model is loaded
    comparison, inputs = prepare_inputs(
        comparison, tokenized, lambda: load_tokenizer(name), lambda: _collect_haystack(texts)
    )
    with TemporaryDirectory() as temporary, keep_mode(loaded := as_model(model)):
        folder = Path(temporary if out is None else out)
        used, failures = compare_recipes(loaded, label, inputs, comparison, folder)
        board = rank_recipes(folder)
    measured = used.perplexity.recipes
    best = choose_best(board, measured, [recipe for recipe in measured if forgets(recipe)])
    kept = None if out is None else folder
    return Evaluation(best.recipe if best else PLAIN, board, tuple(failures), kept, best.ties if best else ())


def _collect_haystack(texts: TextInput | Sequence[TextInput]) -> dict[str, Haystack]:
    """Return the user's own texts as one to hide passkeys in."""
    inputs = [texts] if isinstance(texts, Text) else texts
    if not isinstance(inputs, str | Path) and any(isinstance(each, Text) for each in inputs):
        raise ValueError("texts: expected text to hide passkeys in, got tokens alone")
    contents = [document.text for document in iterate_documents(inputs)]
    if None in contents:
        raise ValueError("texts: expected text to hide passkeys in, got tokens alone")
    haystack = Haystack.from_texts(content for content in contents if content is not None)
    return {name_filler(haystack.sha256): haystack}


def name_filler(identity: str) -> str:
    """Return the name of the user's own text as a filler; other texts in the same folder of results have another."""
    return f"text-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"


def prepare_inputs(
    comparison: Comparison,
    texts: Sequence[Text],
    make_tokenizer: Callable[[], Any],
    make_haystacks: Callable[[], Mapping[str, Haystack]],
    chat: bool | None = None,
    notify: Notify = lambda line: None,
) -> tuple[Comparison, EvaluationInputs]:
    """Prepare what a model reads; retrieval that is optional is left out where there is no text or no tokenizer.

    Args:
        comparison: what is measured.
        texts: for perplexity.
        make_tokenizer: loads the model's tokenizer.
        make_haystacks: loads the texts that answers are hidden in.
        chat: as for `PromptFormat.from_tokenizer`.
        notify: called with the reason where retrieval is left out.

    Returns:
        The comparison with the retrieval that is left, and the inputs.
    """
    if comparison.retrieval is None:
        return comparison, EvaluationInputs(texts)
    try:
        haystacks = make_haystacks()
        prompts = PromptFormat.from_tokenizer(make_tokenizer(), chat)
        comparison = replace(comparison, retrieval=replace(comparison.retrieval, fillers=tuple(haystacks)))
    except (ValueError, OSError) as error:
        if not comparison.optional_retrieval:
            raise
        notify(f"passkeys left out: {error}")
        return replace(comparison, retrieval=None), EvaluationInputs(texts)
    return comparison, EvaluationInputs(texts, prompts, haystacks)


def plan_comparison(
    config: PreTrainedConfig, name: str, recipes: Sequence[str], length: int | str, passkeys: bool | None
) -> Comparison:
    """Plan a comparison with the plain model, by the training length in a model's config.

    Args:
        config: the model's.
        name: what the results call it.
        recipes: the usual ones where there are none; `auto` is replaced by what it stands for.
        length: tokens, or as "4x" times the training length.
        passkeys: whether passkeys are hidden in the texts; None where they can be.
    """
    trained = read_train_length(config.get_text_config())
    if trained is None or trained < 4:
        raise ValueError(f"model: expected a config that states the training length, got {trained} in {name}")
    tokens = parse_longer_length(length, trained)
    chosen = resolve_auto(recipes, config, tokens) or usual_recipes(trained, tokens)
    compared = tuple(dict.fromkeys((PLAIN, *chosen)))
    retrieval = RetrievalConfig(compared, ("passkey",), (tokens,), PASSKEY_DEPTHS, 1, score="forced")
    return Comparison(
        name=name,
        title=f"{name} at {tokens} tokens",
        perplexity=PerplexityConfig(compared, choose_edges(trained, tokens)),
        retrieval=None if passkeys is False else retrieval,
        skip_unsupported=not recipes,
        optional_retrieval=passkeys is None,
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
        f"rerope:window={half}+share+{auto.format_retrieve(trained)}",
        f"lampe:tail=0+yarntemperature:factor=2+{auto.format_retrieve(trained)}",
        f"selfextend:window={half},group={group}",
        f"selfextend:window={half},group={group}+share",
        f"sink:sinks=4,size={max(1, trained - 4)}",
        f"rerope:window={most}+lambda:sinks=5,window={most}",
    )


def parse_longer_length(length: int | str, trained: int) -> int:
    """Parse a length as `parse_length` does; raise a ValueError for one that is not beyond the training length."""
    tokens = parse_length(length, trained)
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
    check_vocabulary(inputs.texts, model)
    check_learned_positions(model, comparison.perplexity.length)
    comparison = keep_supported(comparison, model, notify)
    retrieval, prompts = comparison.retrieval, inputs.prompts
    if retrieval is not None and prompts is not None:  # refused before anything is measured
        try:
            check_retrieval(model, prompts, inputs.haystacks, retrieval)
        except ValueError as error:
            if not comparison.optional_retrieval:
                raise
            notify(f"passkeys left out: {error}")
            retrieval, comparison = None, replace(comparison, retrieval=None)
    notify(
        estimate_cost(model, inputs.texts, comparison.perplexity, retrieval, folder).format(
            comparison.perplexity.length
        )
    )
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
    if retrieval is not None:
        metadata["fillers"] = list(retrieval.fillers)
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
