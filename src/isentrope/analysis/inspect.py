"""Inspect a model's attention: how focused it is, at which angles, and where."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForMaskedLM, PreTrainedModel

import isentrope.models  # noqa: F401  # GAU-α among transformers' models
from isentrope.analysis import attention_statistics as statistics
from isentrope.analysis.attention_statistics import HeatmapWindow
from isentrope.analysis.observe import entropy_rows, find_gated_units, run_observed
from isentrope.evaluation.loading import get_model_name, load_causal_model, load_on_device, load_tokenizer
from isentrope.evaluation.recipe_texts import PLAIN, under_recipe
from isentrope.evaluation.results import write_results
from isentrope.evaluation.texts import Text, TextInput, check_vocabulary, iterate_documents
from isentrope.hf.capture import CapturedAttention, get_recipe
from isentrope.hf.extend import extend, restore
from isentrope.hf.names import CONFIG_KEY
from isentrope.hf.train_length import read_train_length
from isentrope.models.gau.config import LEARNED_WEIGHTS, GAUAlphaConfig
from isentrope.pretrained import (
    load_pretrained,
    read_config,
    resolve_model_device,
    resolve_model_name,
)
from isentrope.scores import Cosine
from isentrope.theory import peak_cosine
from isentrope.utils.files import write_atomically
from isentrope.utils.parsing import parse_numbers
from isentrope.utils.progress import track_progress
from isentrope.utils.provenance import collect_provenance

PEAK_BINS = 5  # neighbouring bins that a peak is the mean of


@dataclass(frozen=True)
class InspectConfig:
    """What is measured.

    Args:
        lengths: tokens of the text that are read, one after another; angles and heatmaps are those at the last.
        layer: whose angles and heatmaps.
        head: the same; by default the mean of all heads.
        region: what the heatmaps show; by default everything.
        inset: a part to show beside it.
        train_length: in place of the one in the model's config.
    """

    lengths: tuple[int, ...]
    layer: int = -1
    head: int | None = None
    region: HeatmapWindow | None = None
    inset: HeatmapWindow | None = None
    train_length: int | None = None

    def __post_init__(self) -> None:
        if not self.lengths or self.lengths[0] < 2 or any(a >= b for a, b in pairwise(self.lengths)):
            raise ValueError(f"lengths: expected increasing numbers of tokens from 2 on, got {list(self.lengths)}")
        if self.train_length is not None and self.train_length < 2:
            raise ValueError(f"train_length: expected 2 or more, got {self.train_length}")
        for window in (self.region, self.inset):
            if window is not None:
                window.check(self.lengths[-1])

    @classmethod
    def parse(cls, lengths: str, region: str | None = None, inset: str | None = None, **others: Any) -> InspectConfig:
        """Build from command-line values."""
        numbers = parse_numbers("lengths", lengths, example="64,512,4096")
        windows = (None if text is None else HeatmapWindow.parse(text) for text in (region, inset))
        return cls(numbers, region=next(windows), inset=next(windows), **others)


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect`.

    Args:
        data: the content of `inspect.json`.
        heatmaps: by name, as `docs/guides/inspect.md` lists them.
        path: of `inspect.json`; None where nothing was kept.
    """

    data: dict[str, Any]
    heatmaps: dict[str, NDArray[np.float32]]
    path: Path | None = None

    @property
    def recipe(self) -> str:
        """The recipe that the model attended under."""
        return str(self.data["recipe"]["text"])

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Entropies in nats: one row for each length and layer, with a number for each head."""
        return [
            {"length": length, "layer": layer, "entropy": entropy, "uniform": uniform}
            for length, entropies, uniforms in zip(
                self.data["lengths"], self.data["entropy"], self.data["uniform"], strict=True
            )
            for layer, entropy, uniform in zip(self.data["layers"], entropies, uniforms, strict=True)
        ]


def inspect(
    model: str | Path | PreTrainedModel,
    text: TextInput,
    lengths: Sequence[int] = (64, 128, 256, 512),
    recipe: str | None = None,
    *,
    out: str | Path | None = None,
    **settings: Any,
) -> Inspection:
    """Measure a model's attention while it reads a text: entropies of all heads, angles and heatmaps of one layer.

    Args:
        model: GAU-α or a causal model: loaded, or a folder or a name on the hub.
        text: a file, of which the first text that is long enough is read, a string of text, or token ids.
        lengths: tokens that are read; angles and heatmaps are those at the last.
        recipe: what attention follows, in place of the model's own.
        out: a folder for `inspect.json` and heatmaps; by default nothing is left on disk.
        **settings: `layer`, `head`, `region`, `inset` and `train_length` of `InspectConfig`.

    Returns:
        The numbers and the heatmaps.
    """
    config = InspectConfig(tuple(lengths), **settings)
    name = get_model_name(model)
    tokenized = text if isinstance(text, Text) else load_text(text, name, config.lengths[-1])
    loaded = load_model(name, recipe) if isinstance(model, str | Path) else model
    applied = PLAIN if recipe is None or loaded is not model else recipe
    with TemporaryDirectory() as temporary, under_recipe(loaded, applied):
        path = measure_attention(loaded, name, tokenized, config, Path(temporary if out is None else out))
        data = json.loads(path.read_text(encoding="utf-8"))
        heatmaps = {kind: np.load(path.with_name(each["file"])) for kind, each in data["heatmaps"].items()}
    return Inspection(data, heatmaps, None if out is None else path)


def _is_gau(name: str, gguf_file: str | None = None) -> bool:
    if gguf_file:
        return False
    # published checkpoints name no type
    kind = read_config(resolve_model_name(name)).get("model_type", GAUAlphaConfig.model_type)
    return bool(kind == GAUAlphaConfig.model_type)


def load_models(
    name: str, recipes: Sequence[str], device: str = "auto", dtype: str = "auto", gguf_file: str | None = None
) -> Iterator[Any]:
    """Yield GAU-α or a causal model under one recipe after another; a causal model is loaded once.

    Args:
        name: a folder, or a name on the hub.
        recipes: texts of recipes; `plain` is the model's own.
        device: such as cpu or cuda; auto is a GPU where there is one.
        dtype: bfloat16, float16 or float32; auto is bfloat16 on a GPU and float32 on a CPU.
        gguf_file: a GGUF file in the folder.
    """
    if len(recipes) == 1 or _is_gau(name, gguf_file):
        for recipe in recipes:
            yield load_model(name, None if recipe == PLAIN else recipe, device, dtype, gguf_file)
        return
    model = load_model(name, None, device, dtype, gguf_file)
    if (own := getattr(model.config, CONFIG_KEY, None)) is not None:
        raise ValueError(f"{name}: already extended with {own}; give the original folder to compare recipes")
    for recipe in recipes:
        with under_recipe(model, recipe):
            yield model


def load_model(
    name: str,
    recipe: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    gguf_file: str | None = None,
) -> Any:
    """Load GAU-α or a causal model from a folder or the hub, under its own recipe or this one."""
    if gguf_file:
        loaded = load_on_device(name, device, dtype, gguf_file)
        return loaded if recipe is None else extend(loaded, recipe)
    device, resolved = resolve_model_device(name, device, dtype)
    if _is_gau(name):  # its recipe is a part of it
        # what another recipe learns may have no weights yet
        options: dict[str, Any] = {} if recipe is None else {"recipe": recipe, "unused": LEARNED_WEIGHTS}
        return load_pretrained(AutoModelForMaskedLM, resolve_model_name(name), dtype=resolved, **options).to(device)
    model: Any = load_causal_model(name, resolved)
    model = model.to(device)
    if recipe is None:
        return model
    return extend(restore(model) if hasattr(model.config, CONFIG_KEY) else model, recipe)


def load_text(text: TextInput | Sequence[TextInput], name: str, length: int, gguf_file: str | None = None) -> Text:
    """Read the first document that has `length` tokens of a model's tokenizer."""
    tokenizer: Any = None
    longest = 0
    for document in iterate_documents(text):
        tokens = document.tokens
        if tokens is None:
            if tokenizer is None:
                # GAU-α is trained on pieces from the middle of texts, without marks around them
                options = (
                    {"add_special_tokens": False, "split_special_tokens": True} if _is_gau(name, gguf_file) else {}
                )
                tokenizer = load_tokenizer(name, gguf_file)
            tokens = tuple(tokenizer(document.text, verbose=False, **options)["input_ids"])
        if len(tokens) >= length:
            return Text(document.name, document.sha256, tokens[:length])
        longest = max(longest, len(tokens))
    label = text if isinstance(text, Path) else "text"
    raise ValueError(f"{label}: expected a text of {length} tokens, the longest of lengths, got {longest} at most")


def measure_attention(model: Any, name: str, text: Text, config: InspectConfig, out: Path) -> Path:
    """Measure a model's attention while it reads a text; write `inspect.json` and heatmaps beside it.

    Args:
        model: GAU-α or a causal model.
        name: its folder, whose weights are hashed into the results, or its name.
        text: what it reads.
        config: lengths, and whose angles and heatmaps.
        out: the folder for the files.

    Returns:
        The path of `inspect.json`.
    """
    longest = config.lengths[-1]
    if len(text.tokens) < longest:
        raise ValueError(f"{text.name}: expected {longest} tokens, the longest of lengths, got {len(text.tokens)}")
    check_vocabulary([text], model)
    trained = config.train_length or read_train_length(model.config.get_text_config())
    lengths = sorted({*config.lengths, *([trained] if trained and trained <= longest else [])})
    ids = torch.tensor(text.tokens[:longest])[None]
    rows: list[list[dict[str, Any]]] = []
    for length in track_progress(lengths, lambda length: f"entropy at {length} tokens"):
        rows.append(entropy_rows(model, ids[:, :length]))
        _check_layer(rows[0], config)
    details = _measure_layer(model, ids, rows[0][config.layer]["index"], config, out)
    entropy = [[layer["entropy"] for layer in row] for row in rows]
    base = entropy[lengths.index(trained)] if trained in lengths else None
    units, dtype = find_gated_units(model), str(next(model.parameters()).dtype)
    recipe = units[0].recipe if units else get_recipe(model)
    results = {
        "model": {"name": Path(name).name, "type": model.config.model_type, "dtype": dtype.removeprefix("torch.")},
        "recipe": {"text": str(recipe), **recipe.to_dict()},
        "weights": _hash_weights(Path(name)) if name else None,
        "config": asdict(config),
        "text": {"name": text.name, "sha256": text.sha256},
        "train_length": trained,
        "lengths": lengths,
        "layers": [layer["index"] for layer in rows[0]],
        "uniform": [[layer["uniform"] for layer in row] for row in rows],
        "entropy": entropy,
        "entropy_ratio": None if base is None else [_ratios(row, base) for row in entropy],
        **details,
        "run": collect_provenance() | {"transformers": transformers.__version__},
    }
    write_results(out / "inspect.json", results, ensure_ascii=True)
    return out / "inspect.json"


def _check_layer(rows: list[dict[str, Any]], config: InspectConfig) -> None:
    layers = len(rows)
    if not -layers <= config.layer < layers:
        raise ValueError(f"layer: expected -{layers} … {layers - 1}, got {config.layer}")
    heads = len(rows[config.layer]["entropy"])
    if config.head is not None and not 0 <= config.head < heads:
        raise ValueError(f"head: expected 0 … {heads - 1}, got {config.head}")


def _ratios(row: list[list[float]], base: list[list[float]]) -> list[list[float | None]]:
    return [
        [a / b if b > 0 else None for a, b in zip(heads, others, strict=True)]
        for heads, others in zip(row, base, strict=True)
    ]


def _measure_layer(model: Any, ids: Tensor, index: int, config: InspectConfig, out: Path) -> dict[str, Any]:
    """Measure angles and heatmaps of one layer, before its position method and after."""
    results: dict[str, Any] = {"layer": index, "angles": {}, "heatmaps": {}}
    whole = config.region or HeatmapWindow(0, ids.shape[1], 0, ids.shape[1])
    out.mkdir(parents=True, exist_ok=True)

    def save_heatmap(kind: str, window: HeatmapWindow, array: Tensor, **numbers: float | None) -> None:
        path = out / f"{kind}.npy"
        with write_atomically(path) as partial, partial.open("wb") as file:
            np.save(file, array.float().numpy(), allow_pickle=False)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        results["heatmaps"][kind] = {"file": path.name, "sha256": digest, **asdict(window), **numbers}

    def observe(captured: CapturedAttention) -> None:
        if captured.index != index:
            return
        for stage, attention in track_progress(
            (("before", captured.without_position()), ("after", captured)), f"layer {index}"
        ):
            pairs, attended = statistics.cosine_histograms(attention)
            histogram = {"pairs": pairs.tolist(), "attention": attended.tolist()}
            peaks = {"pairs_peak": _peak(pairs), "attention_peak": _peak(attended)}
            results["angles"][stage] = histogram | peaks
            scores, low, high = statistics.score_map(attention, whole, config.head)
            save_heatmap(f"scores_{stage}", whole, scores, least=low, largest=high)
        save_heatmap("attention", whole, statistics.log_attention_map(captured, whole, config.head))
        if config.inset is not None:
            save_heatmap("inset", config.inset, statistics.log_attention_map(captured, config.inset, config.head))
        results["theory"] = _theory(captured)

    run_observed(model, ids, observe)
    return results


def _peak(histogram: Tensor) -> float:
    """Find the cosine where a histogram, smoothed over PEAK_BINS, is highest."""
    values, kernel = histogram.numpy(), np.ones(PEAK_BINS)
    smooth = np.convolve(values, kernel, "same") / np.convolve(np.ones_like(values), kernel, "same")
    return float((2 * int(smooth.argmax()) + 1) / len(values) - 1)


def _theory(captured: CapturedAttention) -> dict[str, float] | None:
    """Compute η* of Eq. 18 for cosine scores; None for others."""
    score, size = captured.recipe.score, captured.q.shape[-1]
    if not isinstance(score, Cosine) or size < 3:
        return None
    return {"alpha": score.alpha, "head_dim": size, "peak_cosine": float(peak_cosine(score.alpha, size))}


def _hash_weights(folder: Path) -> str | None:
    """Compute sha256 of a folder's weights; None where it has none."""
    digest = hashlib.sha256()
    files = sorted(folder.expanduser().glob("*.safetensors"))
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest() if files else None
