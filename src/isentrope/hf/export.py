"""Write extended models for programs that do not import isentrope."""

from __future__ import annotations

import json
import warnings
from math import log
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from isentrope.hf.extension import Extension, find_model, get_extension
from isentrope.hf.rope import FREQUENCY_BUFFER, ModelRope
from isentrope.hf.saved_models import AUTO_MODULE, copy_plain_config
from isentrope.masks import Causal, Full, Window
from isentrope.positions import NTK, PI, LongRoPE, RoPE, YaRN
from isentrope.recipe import LayerRecipes, Recipe
from isentrope.scores import Dot
from isentrope.temperatures import Constant, YaRNTemperature
from isentrope.utils.files import write_atomically

REMOTE_CODE = '''"""Lets transformers read this model, with trust_remote_code, where isentrope is installed."""

from isentrope.saved_config import IsentropeConfig

__all__ = ["IsentropeConfig"]
'''
# largest difference of logits, in units of their spread, that rounding explains
MAX_LOGIT_DIFFERENCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
MAX_CHECK_LENGTH = 4096


def export(model: nn.Module, folder: str | Path, *, remote_code: bool = False, **options: Any) -> Path:
    """Write an extended model for programs that do not import isentrope.

    By default it becomes a plain model of transformers, which other engines read too. That takes a recipe that
    transformers has itself: `pi`, `yarn` (with the static `yarntemperature`, or none), `ntk`, `longrope`,
    `rope:base=…`, and `window` on models with windows.

    Args:
        model: an extended model.
        folder: where to write it; must not exist.
        remote_code: keep the recipe, whichever it is, and add a module that programs load with trust_remote_code=True;
            they need isentrope installed, not imported.
        **options: passed to `save_pretrained`.

    Returns:
        The folder.

    Raises:
        ValueError: the model is not extended, the folder exists, or transformers has no form of the recipe whose
            frequencies are equal bit for bit and whose logits are equal to rounding; nothing is written then.
    """
    extension, inner, folder = get_extension(model), find_model(model), Path(folder)
    if folder.exists():
        raise ValueError(f"folder: expected one that does not exist yet, got {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(folder) as partial:
        if remote_code:
            inner.save_pretrained(partial, **options)
            _add_remote_code(partial)
        else:
            _build_native_model(inner, extension).save_pretrained(partial, **options)
    return folder


def _add_remote_code(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["auto_map"] = {"AutoConfig": f"{AUTO_MODULE}.IsentropeConfig"}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (folder / f"{AUTO_MODULE}.py").write_text(REMOTE_CODE, encoding="utf-8")


def _build_native_model(model: PreTrainedModel, extension: Extension) -> PreTrainedModel:
    """Build the model of transformers that computes the same, on the same weights."""
    config = copy_plain_config(model.config)
    text = config.get_text_config()
    _write_rope(text, extension)
    _write_window(text, extension.recipe)
    config._attn_implementation = "sdpa" if type(model)._supports_sdpa else "eager"
    native = _rebuild(model, config)
    _check_frequencies(model, native, extension)
    _check_logits(model, native, extension)
    return native


def _write_rope(config: PreTrainedConfig, extension: Extension) -> None:
    """Write the recipe as rope_parameters into a config."""
    recipe, kind = extension.recipe, extension.model_type
    if isinstance(recipe, LayerRecipes):
        raise ValueError(_no_native_form(recipe, "its layers differ"))
    if recipe.score is not None and not isinstance(recipe.score, Dot):
        raise ValueError(_no_native_form(recipe, f"{recipe.score} changes scores"))
    changed = {rope.layer_type: rope for rope, _, _ in extension.frequencies}
    if _get_switch_length(recipe.position) is not None:
        changed = {layer.rope.layer_type: layer.rope for layer in extension.layers if layer.rope is not None}
    if recipe.position is None or (not changed and type(recipe.position) is RoPE):
        _to_rope_parameters(recipe, {}, 2, config)  # refuses temperatures
        return
    if not changed:
        raise ValueError(_no_native_form(recipe, "it needs distances that one angle a position cannot express"))
    for layer_type, rope in changed.items():
        parameters = dict(rope.parameters)
        if parameters.get("rope_type", "default") != "default":
            raise ValueError(
                f"{kind}: its frequencies are already scaled (rope_type {rope.kind!r}); export cannot join two"
            )
        written = _to_rope_parameters(recipe, parameters, 2 * rope.theta.shape[-1], config)
        if layer_type is None:
            config.rope_parameters = written
        else:
            config.rope_parameters[layer_type] = written
    if type(recipe.position) is YaRN:
        config.max_position_embeddings = int(recipe.position.factor * recipe.position.require_original_length())


def _to_rope_parameters(
    recipe: Recipe, parameters: dict[str, Any], dim: int, config: PreTrainedConfig
) -> dict[str, Any]:
    """Express a position method and a temperature as transformers' rope_parameters."""
    if len(recipe.temperatures) > 1 or recipe.share is not None:
        raise ValueError(_no_native_form(recipe, f"{recipe.share or 'a pair of temperatures'} has none"))
    position, law = recipe.position, recipe.temperature
    if (base := getattr(position, "base", None)) is not None:
        parameters = parameters | {"rope_theta": base}
    static = isinstance(law, YaRNTemperature) and law.factor is not None
    if type(position) is YaRN:
        if not (law is None or isinstance(law, Constant) or static):
            raise ValueError(_no_native_form(recipe, f"{law} changes with the length"))
        return parameters | {
            "rope_type": "yarn",
            "factor": position.factor,
            "original_max_position_embeddings": position.require_original_length(),
            "beta_fast": position.beta_fast,
            "beta_slow": position.beta_slow,
            **_write_attention_factor(position.factor, law.factor if static else 1.0),
        }
    if not (law is None or isinstance(law, Constant)):
        raise ValueError(_no_native_form(recipe, f"{law} has none beside {position or 'a model as it is'}"))
    match position:
        case None:
            return parameters
        case PI():
            return parameters | {"rope_type": "linear", "factor": position.factor}
        case NTK(dynamic=True):
            if position.require_original_length() != config.max_position_embeddings:
                raise ValueError(_no_native_form(recipe, "transformers counts from max_position_embeddings"))
            return parameters | {"rope_type": "dynamic", "factor": position.factor}
        case NTK():
            return parameters | {"rope_theta": parameters["rope_theta"] * position.factor ** (dim / (dim - 2))}
        case LongRoPE(factors=tuple(long)):
            length = position.original_length
            short = position.short or (long if length is None else (1.0,) * len(long))
            return parameters | {
                "rope_type": "longrope",
                "long_factor": list(long),
                "short_factor": list(short),
                "original_max_position_embeddings": length or config.max_position_embeddings,
                "attention_factor": 1.0,
            }
        case RoPE():
            return parameters
    raise ValueError(_no_native_form(recipe, f"{position} has none"))


def _write_attention_factor(factor: float, temperature_factor: float) -> dict[str, float]:
    """Return the attention factor of YaRN, none where it is the one of the paper, which every engine has by itself."""
    default, written = (0.1 * log(max(x, 1.0)) + 1 for x in (factor, temperature_factor))
    if written == default:
        return {}
    warnings.warn(
        f"export: yarn is written with attention_factor {written:.4g} for transformers, but other engines may apply "
        f"YaRN's own {default:.4g} all the same; for those, extend with yarn:factor={factor:g}+yarntemperature:"
        f"factor={factor:g}, YaRN as published",
        stacklevel=6,
    )
    return {"attention_factor": written}


def _get_switch_length(position: Any) -> int | None:
    """Return the length beyond which a method has other frequencies; None where it has the same at any."""
    if (isinstance(position, NTK) and position.dynamic) or (isinstance(position, LongRoPE) and position.factors):
        return position.original_length
    return None


def _write_window(config: PreTrainedConfig, recipe: Recipe) -> None:
    mask = recipe.mask
    if mask is None or isinstance(mask, (Causal, Full)):
        return
    if not isinstance(mask, Window):
        raise ValueError(_no_native_form(recipe, f"{mask} has none"))
    if not hasattr(config, "sliding_window"):
        raise ValueError(_no_native_form(recipe, f"{config.model_type} has no windows"))
    config.sliding_window = mask.size
    if hasattr(config, "use_sliding_window"):
        config.use_sliding_window = True
    if getattr(config, "layer_types", None):
        config.layer_types = ["sliding_attention"] * len(config.layer_types)


def _no_native_form(recipe: Recipe, reason: str) -> str:
    return (
        f"recipe {str(recipe)!r:.200} has no form of its own in transformers: {reason}; save it with save_pretrained, "
        "or export it with remote_code=True"
    )


def _rebuild(model: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model of another config on the same weights, which are not copied."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        native = type(model)(config)
    native.load_state_dict(model.state_dict(), strict=False, assign=True)
    buffers = dict(model.named_buffers())
    for name, module in list(native.named_modules()):
        for key, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta:
                continue
            if key.endswith(FREQUENCY_BUFFER):
                fresh: Any = type(module)(config=module.config)
                own = getattr(fresh, key).to(model.device)
            else:
                own = buffers[f"{name}.{key}" if name else key]
            module.register_buffer(key, own, persistent=key not in module._non_persistent_buffers_set)
    native.tie_weights()
    left = [name for name, x in (*native.named_parameters(), *native.named_buffers()) if x.is_meta]
    if left:
        what = ", ".join(left[:3])
        raise ValueError(f"{config.model_type}: export cannot rebuild {what}; merge or unload adapters first")
    native.generation_config = model.generation_config
    return native.train(model.training)


def _check_frequencies(model: PreTrainedModel, native: PreTrainedModel, extension: Extension) -> None:
    """Check that both rotate by the same frequencies, bit for bit."""
    twins = dict(zip(model.modules(), _match_modules(model, native), strict=True))
    for rope, _, _ in extension.frequencies:
        twin = ModelRope(twins[rope.module], rope.layer_type)
        if not torch.equal(twin.theta.to(rope.theta), rope.theta):
            raise ValueError(
                f"{extension.model_type}: transformers' frequencies differ from those of {extension.recipe.position}"
            )


def _match_modules(model: nn.Module, native: nn.Module) -> list[Any]:
    """List the modules of `native` in the order of `model`'s, None where it has none of that name."""
    named = dict(native.named_modules())
    return [named.get(name) for name, _ in model.named_modules()]


def _check_logits(model: PreTrainedModel, native: PreTrainedModel, extension: Extension) -> None:
    """Check that both predict the same, near and far, to rounding."""
    mask, position = extension.recipe.mask, extension.recipe.position
    length = 64
    if isinstance(mask, Window):
        length = min(mask.size + 16, MAX_CHECK_LENGTH)
    if (switch := _get_switch_length(position)) is not None:
        length = min(switch + 16, MAX_CHECK_LENGTH)
    size = model.config.get_text_config().vocab_size
    ids = torch.randint(size, (1, length), generator=torch.Generator().manual_seed(0)).to(model.device)
    training = model.training
    with torch.no_grad():
        ours, theirs = (m.eval()(input_ids=ids)[0].double() for m in (model, native))
    model.train(training)
    native.train(training)
    difference = ((ours - theirs).abs().max() / ours.std().clamp_min(1e-12)).item()
    if not difference <= MAX_LOGIT_DIFFERENCE.get(model.dtype, 0.1):
        raise ValueError(
            f"{extension.model_type}: transformers' own form of {extension.recipe} differs by {difference:.2g} "
            "deviations"
        )
