"""Looking inside a model: how focused its attention is, at which angles, and where."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM

import isentrope.models  # noqa: F401  # GAU-α among transformers' models
from isentrope.analysis import attention_statistics as weights
from isentrope.analysis.attention_statistics import Window
from isentrope.data.corpus import read_documents
from isentrope.evaluation.loading import load_causal_model
from isentrope.evaluation.texts import Text
from isentrope.hf.capture import CapturedAttention, capture_attention, get_recipe
from isentrope.hf.extend import extend, restore
from isentrope.hf.layer_plan import read_train_length
from isentrope.hf.names import CONFIG_KEY
from isentrope.models.gau.config import LEARNED_WEIGHTS, GAUAlphaConfig
from isentrope.models.gau.modeling import GatedAttentionUnit
from isentrope.pretrained import (
    load_pretrained,
    read_config,
    read_tokenizer,
    resolve_model_device,
    resolve_model_name,
)
from isentrope.scores import Cosine
from isentrope.theory import peak_cosine
from isentrope.utils.files import write_atomically
from isentrope.utils.progress import track_progress
from isentrope.utils.provenance import collect_provenance

SMOOTH = 5  # bins that a peak is looked for over


@dataclass(frozen=True)
class Config:
    """lengths: how many tokens of the text are read, one after another; angles and heatmaps are those at the last.

    layer, head: whose; the mean of all heads where none is named. region: what the heatmaps show, everything by
    default; inset: a part to show beside it. train_length: in place of what the model's config says.
    """

    lengths: tuple[int, ...]
    layer: int = -1
    head: int | None = None
    region: Window | None = None
    inset: Window | None = None
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
    def read(cls, lengths: str, region: str | None = None, inset: str | None = None, **others: Any) -> Config:
        """From words of a command line."""
        try:
            numbers = tuple(int(length) for length in lengths.split(","))
        except ValueError:
            raise ValueError(f"lengths: expected numbers of tokens such as 64,512,4096, got {lengths!r}") from None
        windows = (None if text is None else Window.read(text) for text in (region, inset))
        return cls(numbers, region=next(windows), inset=next(windows), **others)


def layer_entropies(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Mean attention entropy of each layer in nats, (layers,) in fp64, over rows, heads and queries.

    model: GAU-α, or a causal transformers model, extended or not. input_ids (batch, n), without padding.
    """
    return torch.stack([heads.mean() for heads in entropies(model, input_ids)])


def entropies(model: nn.Module, input_ids: Tensor) -> list[Tensor]:
    """Mean attention entropy of each layer's heads in nats, (heads,) in fp64 each, over rows and queries."""
    found: list[Tensor] = []
    read_through(model, input_ids, lambda seen: found.append(weights.entropy(seen)))
    return found


def read_through(model: Any, input_ids: Tensor, see: Callable[[CapturedAttention], None]) -> None:
    """Let a model read tokens, and show every layer's attention to `see`; nothing is kept of it."""
    inner = getattr(model, "base_model", model)  # without logits
    options = {"use_cache": False} if hasattr(inner.config, "use_cache") else {}
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(), watched(model, see):
            inner(input_ids=input_ids.to(inner.device), **options)
    finally:
        model.train(training)


@contextmanager
def watched(model: nn.Module, see: Callable[[CapturedAttention], None]) -> Iterator[None]:
    """While the block lasts, `see` is called for each attention layer that runs."""
    units = _units(model)
    with ExitStack() as stack:
        if not units:
            stack.enter_context(capture_attention(model, see))
        for index, gau in enumerate(units):
            for handle in _hooks(index, gau, see):
                stack.callback(handle.remove)
        yield


def _units(model: nn.Module) -> list[GatedAttentionUnit]:
    return [module for module in model.modules() if isinstance(module, GatedAttentionUnit)]


def _hooks(index: int, gau: GatedAttentionUnit, see: Callable[[CapturedAttention], None]) -> Iterator[Any]:
    """Queries and keys are what their own modules put out; the layout is what the unit was called with."""
    made: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            made[name] = out[:, None]  # one head

        return hook

    def show(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        see(CapturedAttention(index, made.pop("q"), made.pop("k"), gau.recipe, {"layout": args[1]}))

    yield gau.q_scaleoffset.register_forward_hook(keep("q"))
    yield gau.k_scaleoffset.register_forward_hook(keep("k"))
    yield gau.register_forward_hook(show)


def _is_gau(name: str) -> bool:
    # published checkpoints do not say of which type they are
    kind = read_config(resolve_model_name(name)).get("model_type", GAUAlphaConfig.model_type)
    return bool(kind == GAUAlphaConfig.model_type)


def load(name: str, recipe: str | None = None, device: str = "auto", dtype: str = "auto") -> Any:
    """GAU-α or a causal model from a folder or the hub, under its own recipe or this one."""
    device, narrow = resolve_model_device(name, device, dtype)
    if _is_gau(name):  # its recipe is a part of it
        # what another recipe learns may have no weights yet
        given: dict[str, Any] = {} if recipe is None else {"recipe": recipe, "unused": LEARNED_WEIGHTS}
        return load_pretrained(AutoModelForMaskedLM, resolve_model_name(name), dtype=narrow, **given).to(device)
    model: Any = load_causal_model(name, narrow)
    model = model.to(device)
    if recipe is None:
        return model
    return extend(restore(model) if hasattr(model.config, CONFIG_KEY) else model, recipe)


def read(path: Path, name: str, length: int) -> Text:
    """The first document of a file that has this many tokens of the model's tokenizer."""
    tokenizer: Any = None
    longest = 0
    for document in read_documents([path]):
        tokens = document.tokens
        if tokens is None:
            if tokenizer is None:
                # GAU-α is trained on pieces from the middle of texts, without marks around them
                options = {"add_special_tokens": False, "split_special_tokens": True} if _is_gau(name) else {}
                tokenizer = read_tokenizer(resolve_model_name(name))
            tokens = tuple(tokenizer(document.text, verbose=False, **options)["input_ids"])
        if len(tokens) >= length:
            return Text(document.name, document.sha256, tokens[:length])
        longest = max(longest, len(tokens))
    raise ValueError(f"{path}: expected a text of {length} tokens, the longest of lengths, got {longest} at most")


def run(
    model: str, text: Path, recipe: str | None, config: Config, out: Path, device: str = "auto", dtype: str = "auto"
) -> Path:
    """`load`, `read` and `measure` in one; the text first, for it is the quickest to be wrong."""
    found = read(text, model, config.lengths[-1])
    return measure(load(model, recipe, device, dtype), model, found, config, out)


def measure(model: Any, name: str, text: Text, config: Config, out: Path) -> Path:
    """Look inside a model while it reads a text; write `inspect.json` and heatmaps beside it into the folder `out`."""
    longest = config.lengths[-1]
    if len(text.tokens) < longest:
        raise ValueError(f"{text.name}: expected {longest} tokens, the longest of lengths, got {len(text.tokens)}")
    trained = config.train_length or read_train_length(model.config.get_text_config())
    lengths = sorted({*config.lengths, *([trained] if trained and trained <= longest else [])})
    ids = torch.tensor(text.tokens[:longest])[None]
    rows: list[list[dict[str, Any]]] = []
    for length in track_progress(lengths, lambda length: f"entropy at {length} tokens"):
        rows.append(told_entropies(model, ids[:, :length]))
        _check(rows[0], config)
    found = _closer(model, ids, rows[0][config.layer]["index"], config, out)
    entropy = [[layer["entropy"] for layer in row] for row in rows]
    base = entropy[lengths.index(trained)] if trained in lengths else None
    units, dtype = _units(model), str(next(model.parameters()).dtype)
    recipe = units[0].recipe if units else get_recipe(model)
    told = {
        "model": {"name": Path(name).name, "type": model.config.model_type, "dtype": dtype.removeprefix("torch.")},
        "recipe": {"text": str(recipe), **recipe.to_dict()},
        "weights": _fingerprint(Path(name)),
        "config": asdict(config),
        "text": {"name": text.name, "sha256": text.sha256},
        "train_length": trained,
        "lengths": lengths,
        "layers": [layer["index"] for layer in rows[0]],
        "uniform": [[layer["uniform"] for layer in row] for row in rows],
        "entropy": entropy,
        "entropy_ratio": None if base is None else [_ratios(row, base) for row in entropy],
        **found,
        "run": collect_provenance() | {"transformers": transformers.__version__},
    }
    results = out / "inspect.json"
    with write_atomically(results) as partial:
        partial.write_text(json.dumps(told, indent=1), encoding="utf-8")
    return results


def told_entropies(model: Any, ids: Tensor) -> list[dict[str, Any]]:
    """For each layer its index, the mean entropy of its heads, and that of uniform attention; ready for JSON."""
    rows: list[dict[str, Any]] = []

    def see(seen: CapturedAttention) -> None:
        rows.append({"index": seen.index, "entropy": weights.entropy(seen).tolist(), "uniform": weights.uniform(seen)})

    read_through(model, ids, see)
    return rows


def _check(rows: list[dict[str, Any]], config: Config) -> None:
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


def _closer(model: Any, ids: Tensor, index: int, config: Config, out: Path) -> dict[str, Any]:
    """Angles and heatmaps of one layer, before its position method and after."""
    found: dict[str, Any] = {"layer": index, "angles": {}, "heatmaps": {}}
    whole = config.region or Window(0, ids.shape[1], 0, ids.shape[1])
    out.mkdir(parents=True, exist_ok=True)

    def picture(kind: str, window: Window, array: Tensor, **numbers: float | None) -> None:
        path = out / f"{kind}.npy"
        with write_atomically(path) as partial, partial.open("wb") as file:
            np.save(file, array.float().numpy(), allow_pickle=False)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        found["heatmaps"][kind] = {"file": path.name, "sha256": digest, **asdict(window), **numbers}

    def see(seen: CapturedAttention) -> None:
        if seen.index != index:
            return
        for stage, shown in track_progress((("before", seen.without_position()), ("after", seen)), f"layer {index}"):
            pairs, attended = weights.cosines(shown)
            histogram = {"pairs": pairs.tolist(), "attention": attended.tolist()}
            peaks = {"pairs_peak": _peak(pairs), "attention_peak": _peak(attended)}
            found["angles"][stage] = histogram | peaks
            scores, low, high = weights.products(shown, whole, config.head)
            picture(f"scores_{stage}", whole, scores, least=low, largest=high)
        picture("attention", whole, weights.log_attention(seen, whole, config.head))
        if config.inset is not None:
            picture("inset", config.inset, weights.log_attention(seen, config.inset, config.head))
        found["theory"] = _theory(seen)

    read_through(model, ids, see)
    return found


def _peak(histogram: Tensor) -> float:
    """The cosine where a histogram is highest, a few bins taken together."""
    values, kernel = histogram.numpy(), np.ones(SMOOTH)
    smooth = np.convolve(values, kernel, "same") / np.convolve(np.ones_like(values), kernel, "same")
    return float((2 * int(smooth.argmax()) + 1) / len(values) - 1)


def _theory(seen: CapturedAttention) -> dict[str, float] | None:
    """η* of Eq. 18 for cosine scores; None for others."""
    score, size = seen.recipe.score, seen.q.shape[-1]
    if not isinstance(score, Cosine) or size < 3:
        return None
    return {"alpha": score.alpha, "head_dim": size, "peak_cosine": float(peak_cosine(score.alpha, size))}


def _fingerprint(folder: Path) -> str | None:
    """sha256 of a folder's weights; None where they lie elsewhere."""
    digest = hashlib.sha256()
    files = sorted(folder.expanduser().glob("*.safetensors"))
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest() if files else None
