"""Let any transformers model attend under a recipe, and undo it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from isentrope.dispatch import check_backend
from isentrope.hf.auto import choose_for_layers
from isentrope.hf.cache_recipe import CacheRecipe
from isentrope.hf.configs import list_configs
from isentrope.hf.continuous_batching import disable_continuous_batching, enable_continuous_batching
from isentrope.hf.distances import find_reach
from isentrope.hf.extension import Extension, find_extension, find_model, get_extension, get_model
from isentrope.hf.generation import restore_length_warnings, silence_length_warnings
from isentrope.hf.introspection import introspect
from isentrope.hf.layer import Layer, get_layer
from isentrope.hf.layer_plan import (
    LayerPlan,
    check_supported,
    check_trained,
    collect_recipes,
    plan_layers,
    resolve_recipe,
)
from isentrope.hf.layout_cache import LayoutCache
from isentrope.hf.names import CONFIG_KEY, EXTENSION, IMPLEMENTATION, LAYER, SHARED_POSITION
from isentrope.hf.paged import begin_step
from isentrope.hf.peft_adapters import mark_adapters, unmark_configs
from isentrope.hf.placement import Placement
from isentrope.hf.rope import ModelRope
from isentrope.hf.rotary_hook import SkipRotation
from isentrope.hf.saved_models import drop_gguf_quantizer, make_config_class
from isentrope.hf.train_length import check_lengths, warn_of_hidden_sinks
from isentrope.hf.unrotated import PlainAngles, restore_rotation
from isentrope.parallel.cache import is_sharded
from isentrope.parallel.context import SequenceParallel
from isentrope.parallel.rows import is_shard_mask
from isentrope.recipe import Recipe
from isentrope.recipe.auto import is_auto, read_auto_length
from isentrope.utils.messages import truncate

Model = TypeVar("Model", bound=PreTrainedModel)


def extend(
    model: Model,
    recipe: Recipe | str,
    *,
    length: int | str | None = None,
    allow_untrained: bool = False,
    backend: str = "auto",
    parallel: SequenceParallel | None = None,
) -> Model:
    """Let a model attend under a recipe, in place. Parts that the recipe does not name stay as the model has them.

    With the recipe "auto" the method, its window and its laws are chosen from the model's training length and the
    length that it is to read (`isentrope.recipe.auto`); `describe` says what was chosen, and why.

    Args:
        model: a transformers model, or a wrapper around one such as PEFT's.
        recipe: a `Recipe`, a `LayerRecipes` or their text, or "auto". A training length that it leaves out is taken
            from the model's config.
        length: with "auto", the tokens that the model is to read: a number, or such as "4x" times its training length.
        allow_untrained: accept parts that a model must be trained with (cosine scores, ALiBi, NoPE, SSMax).
        backend: one of `isentrope.attention`'s for all calls, those of a prompt and those of one token.
        parallel: `ContextParallel` or `Ulysses`, by which processes share the sequences that its `shard` was given.

    Returns:
        The same model.

    Raises:
        ValueError: the model or the recipe is not supported; the model is then as it was.
    """
    inner = get_model(model)
    if (extension := find_extension(inner)) is not None:
        own = truncate(str(extension.recipe))
        raise ValueError(f"model: already extended with {own!r}; call isentrope.restore(model) first")
    if any(isinstance(module, Layer) for module in model.modules()):
        raise ValueError("model: a model inside it is already extended; restore that one first")
    check_backend(backend)
    if is_auto(recipe):
        length = read_auto_length(str(recipe), length)
    elif length is not None:
        raise ValueError(f"length: expected none with a recipe other than 'auto', got {length!r}; leave it out")
    check_whole(inner)
    extend_checked(model, inner, recipe, backend, allow_untrained, length)
    if parallel is not None:
        set_parallel(model, parallel)
    return model


def set_parallel(model: nn.Module, parallel: SequenceParallel) -> None:
    """Let processes share the sequences that an extended model reads."""
    extension = get_extension(model)
    for info in extension.layers:
        get_layer(info.module).parallel = parallel
    inner = find_model(model)
    extension.handles.append(inner.base_model.register_forward_pre_hook(_note_shard, with_kwargs=True))
    extension.handles.append(inner.register_forward_pre_hook(_check_shard_labels, with_kwargs=True))


def _note_shard(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """A hook on a model whose sequences processes share: notice a mask that does not arrive."""
    layer = next(layer for layer in module.modules() if isinstance(layer, Layer))
    layer.layouts.sharded = is_shard_mask(kwargs.get("attention_mask")) or is_sharded(kwargs.get("past_key_values"))


def _check_shard_labels(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """A hook on a model whose sequences processes share: refuse losses that are no sum over processes."""
    kind = getattr(module, "loss_type", None)
    if kwargs.get("labels") is not None and is_shard_mask(kwargs.get("attention_mask")) and kind != "ForCausalLM":
        raise ValueError(
            f"labels: expected a causal language model, whose loss processes share exactly, got "
            f"{type(module).__name__}; leave labels out, and compute the loss from the gathered logits"
        )


def extend_checked(
    model: Model,
    inner: PreTrainedModel,
    recipe: Recipe | str,
    backend: str,
    allow_untrained: bool | None = None,
    length: int | str | None = None,
    saved: dict[str, Any] | None = None,
) -> Model:
    """Extend a model that is known not to be extended yet.

    Args:
        model: what was passed to `extend`.
        inner: the transformers model in it.
        recipe: as for `extend`.
        backend: as for `extend`.
        allow_untrained: as for `extend`; None neither refuses nor warns.
        length: of the recipe "auto"; None for any other.
        saved: what else a saved config says of the recipe: "reasons", "base", "measured", "warning".
    """
    kind, config, layers = inner.config.model_type, inner.config.get_text_config(), introspect(inner)
    notes: dict[str, Any] = {"base": get_base_name(inner)} | (saved or {})
    if length is not None:
        recipe, reasons = choose_for_layers(layers, config, length)
        notes["reasons"] = list(reasons)
    recipe = resolve_recipe(recipe, config, layers)
    check_supported(recipe, kind, layers)
    if allow_untrained is not None:
        check_trained(recipe, kind, allow_untrained)
    extension = Extension(recipe, kind, layers, notes)
    plans = plan_layers(recipe, layers, config, inner)
    if allow_untrained is not None:
        check_lengths(recipe, inner)
        warn_of_hidden_sinks(recipe, extension.layers, extension.model_type)
    try:
        _apply(model, inner, extension, plans, backend)
    except BaseException:
        _undo(model, inner, extension)
        raise
    setattr(inner, EXTENSION, extension)
    return model


def restore(model: Model) -> Model:
    """Undo `extend`: the model is what it was, bit for bit. Parameters that the recipe added are dropped.

    Args:
        model: an extended model.

    Returns:
        The same model.

    Raises:
        ValueError: the model is not extended.
    """
    inner = find_model(model)
    _undo(model, inner, get_extension(model))
    delattr(inner, EXTENSION)
    return model


@contextmanager
def extended(model: Model, recipe: Recipe | str, **options: Any) -> Iterator[Model]:
    """Extend a model for the length of a `with` block.

    Args:
        model: as for `extend`.
        recipe: as for `extend`.
        **options: further arguments of `extend`.

    Yields:
        The same model.

    Raises:
        ValueError: as `extend` does.
    """
    extend(model, recipe, **options)
    try:
        yield model
    finally:
        if find_extension(model) is not None:
            restore(model)


def check_whole(inner: PreTrainedModel) -> None:
    """Raise ValueError for a model without a head that is part of another."""
    if (outer := _find_containing_model(inner)) is not None:
        raise ValueError(
            f"model: it is part of a {type(outer).__name__}, which would be saved without it; extend that one"
        )


def get_base_name(model: PreTrainedModel) -> str:
    """Return the name of what a model was loaded from: on the hub, or of its folder without the path to it."""
    name = str(getattr(model, "name_or_path", "") or "")
    is_path = Path(name).exists() or name.startswith((".", "/", "~")) or name.count("/") > 1
    return Path(name).name if is_path else name


def _find_containing_model(inner: PreTrainedModel) -> PreTrainedModel | None:
    """Return the transformers model that a model without a head is part of, or None: modules do not store it."""
    if inner.base_model is not inner:
        return None
    for collect in (False, True):
        if collect:  # it may be garbage that has not been collected yet
            gc.collect()
        models = [x for x in gc.get_objects() if issubclass(type(x), PreTrainedModel) and "_modules" in vars(x)]
        outer = next((x for x in models if x is not inner and any(part is inner for part in x.modules())), None)
        if outer is None:
            return None
    return outer


def _apply(
    model: nn.Module, inner: PreTrainedModel, extension: Extension, plans: list[LayerPlan], backend: str
) -> None:
    recipe = extension.recipe
    saved = {"recipe": recipe.to_dict(), "backend": backend, **extension.notes}
    # attn_implementation in config.json: a class of transformers by itself does not run it, see saved_models.py
    marks = {CONFIG_KEY: saved, "attn_implementation": IMPLEMENTATION}
    _copy_configs(model, inner, extension, marks)
    extension.quantizer = drop_gguf_quantizer(inner)
    for position in (one.position for one in recipe.recipes):
        if isinstance(position, nn.Module):  # at most one, as `check_supported` has checked
            setattr(inner, SHARED_POSITION, position.to(inner.device).train(inner.training))
    skipped: dict[nn.Module, dict[str | None, bool]] = {}
    layouts, recipes, angles = LayoutCache(len(plans)), collect_recipes(plans), PlainAngles()
    for index, (info, plan) in enumerate(zip(extension.layers, plans, strict=True)):
        layer = Layer(info, plan, backend, index, layouts, recipes)
        device = next((x.device for x in info.module.parameters()), inner.device)  # packed linears have none
        if device.type == "meta" and plan.recipe.learned:
            raise ValueError(f"{extension.model_type}: {info.name} is offloaded, so {recipe} has nowhere to learn")
        setattr(info.module, LAYER, layer.to(device).train(info.module.training))
        if plan.skipped_rope is not None:
            in_pages = plan.rotated_recipe is not None
            skipped.setdefault(plan.skipped_rope.module, {})[plan.skipped_rope.layer_type] = in_pages
            angles.omit_rotation(info.module)
        if plan.theta is not None and info.rope is not None:
            _write_frequencies(extension, info.rope, plan.theta)
    consecutive = not all(info.receives_positions for info in extension.layers)
    handles = extension.handles
    for module, layer_types in skipped.items():
        hook = SkipRotation(module, layer_types, consecutive, layouts, angles)
        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    handles.append(inner.base_model.register_forward_pre_hook(_check_implementation))
    handles.append(inner.base_model.register_forward_pre_hook(Placement(inner.base_model, extension.layers).check))
    handles.append(inner.base_model.register_forward_pre_hook(partial(begin_step, layouts), with_kwargs=True))
    handles.append(inner.base_model.register_forward_pre_hook(layouts.begin_pass))
    handles.append(inner.base_model.register_forward_hook(layouts.end_pass))
    rotates = any(plan.skipped_rope is not None or plan.theta is not None for plan in plans)
    caches = CacheRecipe(str(recipe), rotates, layouts)
    handles.append(inner.base_model.register_forward_pre_hook(caches.check, with_kwargs=True))
    handles.append(inner.base_model.register_forward_hook(caches.mark_output))
    handles.append(inner.register_state_dict_pre_hook(mark_adapters))
    silence_length_warnings(inner, _find_reach)
    enable_continuous_batching(inner)


def _find_reach(model: PreTrainedModel) -> int | None:
    """Return the longest text that an extended model knows all distances of; None where all texts are such."""
    if (extension := find_extension(model)) is None:
        return None
    if extension.reach is None:
        extension.reach = (find_reach(extension, model.config.get_text_config()),)
    return extension.reach[0]


def _check_implementation(module: nn.Module, args: Any) -> None:
    """A hook on an extended model."""
    if module.config._attn_implementation != IMPLEMENTATION:  # type: ignore[union-attr]
        raise RuntimeError("the attention implementation was changed: call isentrope.restore(model) before that")


def _write_frequencies(extension: Extension, rope: ModelRope, theta: Tensor) -> None:
    if any(written.same(rope) for written, _, _ in extension.frequencies):
        return
    extension.frequencies.append((rope, rope.theta, rope.scaling))
    rope.write(theta, rope.scaling)


def _copy_configs(model: nn.Module, inner: PreTrainedModel, extension: Extension, marks: dict[str, Any]) -> None:
    """Give the model config objects of its own, the outermost marked: other models may share those it has."""
    originals = list_configs(model)
    extension.configs = []
    for original, own in zip(originals, copy.deepcopy(originals), strict=True):
        own._attn_implementation = IMPLEMENTATION
        if original is inner.config:
            own.__class__ = make_config_class(type(own))
            for name, value in marks.items():
                setattr(own, name, value)
        extension.configs.append((original, own, copy.deepcopy(own.__dict__)))
    _replace_configs(model, {id(original): own for original, own, _ in extension.configs})


def _replace_configs(model: nn.Module, new: dict[int, PreTrainedConfig]) -> None:
    for module in model.modules():
        config = module.__dict__.get("config")
        if id(config) in new:
            module.config = new[id(config)]  # type: ignore[assignment]


def _undo(model: nn.Module, inner: PreTrainedModel, extension: Extension) -> None:
    for handle in extension.handles:
        handle.remove()
    restore_length_warnings(inner)
    disable_continuous_batching(inner)
    unmark_configs(inner)
    inner.__dict__.update(extension.quantizer)
    for rope, theta, scaling in extension.frequencies:
        rope.write(theta.to(rope.theta.dtype), scaling)  # the model may have been moved since
    for info in extension.layers:
        if hasattr(info.module, LAYER):
            delattr(info.module, LAYER)
        restore_rotation(info.module)
    if hasattr(inner, SHARED_POSITION):
        delattr(inner, SHARED_POSITION)
    for original, own, values in extension.configs:
        for name, value in own.__dict__.items():
            # what was changed meanwhile stays changed; sub-configs are objects of their own
            if not isinstance(value, PreTrainedConfig) and (name not in values or values[name] != value):
                setattr(original, name, value)
    _replace_configs(model, {id(own): original for original, own, _ in extension.configs})
