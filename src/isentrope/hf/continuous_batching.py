"""Continuous batching of transformers for extended models: `generate_batch`, `transformers serve`."""

from __future__ import annotations

import warnings
from copy import copy
from typing import Any
from weakref import ref

import torch
from torch import nn
from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager

from isentrope.hf.layer import Layer
from isentrope.hf.model_runner import (
    ExtendedModelRunner,
    find_graph_refusal,
    list_layers,
    prefers_graphs,
    warn_of_graphs,
)
from isentrope.hf.rope import LENGTH_DEPENDENT_ROPE_TYPES
from isentrope.utils.messages import truncate

_INIT = "init_continuous_batching"  # the method of a model that makes a manager
_MANAGER = "_cached_continuous_batching_manager"  # attribute of a model: a manager kept for later


class ExtendedBatchingManager(ContinuousBatchingManager):
    """transformers' manager, for a model whose attention is isentrope's."""

    def __init__(self, model: Any, generation_config: Any, continuous_batching_config: Any, **options: Any) -> None:
        check_servable(model)
        config = copy(continuous_batching_config)  # which the caller may serve other models with
        if config.use_cuda_graph is None and getattr(config, "auto_switch_to_flash", True):
            config.use_cuda_graph = True if prefers_graphs(model, model.device) else None
        super().__init__(model, generation_config, config, **options)
        resolved = self.continuous_batching_config
        _check_uncompiled(resolved)
        if any(resolved.cuda_graph_booleans):
            reason = find_graph_refusal(model)
            # of both paths that the engine has: one alone would have its own sizes, and a graph for each length
            resolved.use_cuda_graph = (reason is None, reason is None)
            if reason is not None:
                warn_of_graphs(reason)
        if resolved.use_async_batching:
            # wrong tokens on a GPU for recipes without far keys, measured with transformers 5.17
            resolved.use_async_batching = False
            warnings.warn(
                "continuous batching: steps of an extended model do not overlap, use_async_batching is off",
                UserWarning,
                stacklevel=2,
            )
        if not shares_prefixes(model):
            resolved.allow_block_sharing = self._use_prefix_sharing = False

    def switch_to_cb_friendly_attn(self, model: Any, *unused: Any) -> None:
        """Keep the attention of the model, which reads paged caches."""

    def _create_batch_processor(self) -> Any:
        """Create what runs the steps, of which those that decode may be captured as graphs."""
        processor = super()._create_batch_processor()
        if not isinstance(processor.model_runner, ExtendedModelRunner):
            processor.model_runner = ExtendedModelRunner(
                logit_processor=processor.logit_processor,
                cb_config=processor.cb_config,
                inputs_and_outputs=processor.inputs_and_outputs,
                cache=processor.cache,
                do_sample=processor.do_sample,
                return_logprobs=processor.return_logprobs,
            )
        return processor


class _InitBatching:
    """`init_continuous_batching` of an extended model.

    On the model itself, so that others keep theirs. The model is referred to weakly, since a cycle would keep it in
    memory until the next garbage collection.
    """

    def __init__(self, model: Any) -> None:
        self.model = ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> _InitBatching:
        return _InitBatching(memo.get(id(self.model()), self.model()))

    def __reduce__(self) -> tuple[Any, ...]:
        return _InitBatching, (self.model(),)

    @torch.no_grad()
    def __call__(
        self, generation_config: Any = None, continuous_batching_config: Any = None, workload_hints: Any = None
    ) -> ContinuousBatchingManager:
        model: Any = self.model()
        kept = getattr(model, _MANAGER, None)
        if isinstance(kept, ExtendedBatchingManager):
            return kept
        generation_config = generation_config or model.generation_config
        if generation_config.eos_token_id is None:
            generation_config.eos_token_id = -1  # never, as transformers has it
        config = continuous_batching_config or getattr(generation_config, "continuous_batching_config", None)
        return ExtendedBatchingManager(
            model, generation_config, config or ContinuousBatchingConfig(), workload_hints=workload_hints
        )


def enable_continuous_batching(model: PreTrainedModel) -> None:
    """Let an extended model be served by continuous batching, where its class can be."""
    _drop_manager(model)
    if hasattr(type(model), _INIT):
        model.__dict__[_INIT] = _InitBatching(model)


def disable_continuous_batching(model: PreTrainedModel) -> None:
    """Undo `enable_continuous_batching`."""
    _drop_manager(model)
    model.__dict__.pop(_INIT, None)


def _drop_manager(model: PreTrainedModel) -> None:
    """Destroy a manager that was kept: its pages were filled under another attention."""
    if getattr(model, _MANAGER, None) is not None:
        model.destroy_cached_continuous_batching_manager()  # type: ignore[operator]


def check_servable(model: nn.Module) -> None:
    """Refuse recipes whose keys depend on the length of the whole text.

    Raises:
        ValueError: a layer has such a recipe.
    """
    for layer in list_layers(model):
        if _depends_on_length(layer):
            raise ValueError(
                f"continuous batching: {truncate(layer.description)} reads a text by its whole length, which is not "
                "known while a prompt comes in parts and requests share pages; use generate, or a recipe without it"
            )


def shares_prefixes(model: nn.Module) -> bool:
    """Return whether keys of a prompt are the same in any request that begins with it.

    Where groups of queries choose far keys together, they depend on how the text was fed in.
    """
    choices = [layer.recipe.retrieve for layer in list_layers(model)]
    return all(choice is None or choice.queries == 1 for choice in choices)


def _depends_on_length(layer: Layer) -> bool:
    position = layer.recipe.position
    if any(getattr(law, "count", "visible") == "sequence" for law in layer.recipe.temperatures):
        return True
    if layer.rope is None or position is None:
        return False
    # those that learn, as CLEX does, have frequencies for each length
    if position.learns or position.depends_on_row_length or layer.rope.kind in LENGTH_DEPENDENT_ROPE_TYPES:
        return True
    device = layer.rope.theta.device
    size = 2 * layer.rope.theta.shape[-1]
    with torch.no_grad():
        short, long = (position.frequencies(size, length, torch.float32, device) for length in (1, 1 << 20))
    return not torch.equal(short, long)


def _check_uncompiled(config: Any) -> None:
    """Refuse compiled passes, where the lengths of requests cannot be read."""
    if config.varlen_compile_config is not None or config.decode_compile_config is not None:
        raise ValueError(
            "continuous batching: expected no compiled passes for an extended model, which plans steps by the lengths "
            "of requests, got some; set default_compile_level=0, and use_cuda_graph=True for fast decoding"
        )
