"""The forward passes of a served model: those that decode may be captured as CUDA graphs, those with prompts are not.

transformers keeps graphs by the padded sizes of a step. An extended model also runs different operations by which
requests are long, so that each such kind of step has graphs of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.utils import CudaGraphBuffer
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from isentrope.core.caching import collect_constants
from isentrope.core.compile import HAS_TRITON
from isentrope.hf.captured_pages import CaptureError, DecodingStep, find_idle_length
from isentrope.hf.layer import Layer
from isentrope.hf.names import PAGED_STEP
from isentrope.utils.messages import truncate

SLIDING = "sliding_attention"


class ExtendedModelRunner(ModelRunner):
    """transformers' runner, which captures graphs of the steps of an extended model that decode.

    With graphs, the engine pads all steps to a few sizes.
    """

    def __init__(self, **options: Any) -> None:
        # before the memory pool of the base class, which must outlive them
        self._graphs: dict[Hashable, CudaGraphBuffer] = {}
        super().__init__(**options)
        self.captures = self.use_cuda_graph_varlen or self.use_cuda_graph_decode
        self._captures_step = False
        self._idle_lengths: list[int] | None = None
        self._constants: dict[int, Tensor] = {}  # which graphs have the addresses of

    def compute_batch(self, model: nn.Module, batch_data: dict[str, Any]) -> None:
        """Run a step, by a graph where there may be one."""
        step = self._find_decoding_step() if self.captures else None
        self._captures_step = step is not None
        if step is not None:
            try:
                self._select_graphs(model, step)
                super().compute_batch(model, batch_data | {PAGED_STEP: step})
                return
            except CaptureError as error:  # before anything is captured; to write the same keys again does no harm
                warn_of_graphs(str(error))
                self.captures = self._captures_step = self.pad_inputs = False
        super().compute_batch(model, batch_data)

    def warmup(self, model: nn.Module) -> None:
        """Do nothing: prompts are not captured, and a graph of a decoding step is when it first occurs."""

    def _get_forward_fn(self, use_block_table: bool) -> tuple[Callable[..., Any], bool]:
        return self._forward_process_and_sample, self._captures_step

    def _capture_graph(self, *arguments: Any) -> None:
        with collect_constants(self._constants):
            super()._capture_graph(*arguments)

    def _find_decoding_step(self) -> DecodingStep | None:
        """Return the step whose inputs have been prepared, where every request has one new token; else None."""
        requests = self._get_io("host_io").requests_in_batch
        if any(request.query_length != 1 for request in requests):
            return None
        lengths = [request.state.position_offset for request in requests]  # the new token included
        return DecodingStep(1 << (len(lengths) - 1).bit_length(), min(lengths), max(lengths))

    def _select_graphs(self, model: nn.Module, step: DecodingStep) -> None:
        """Let the engine find graphs among those of this kind of step alone."""
        if self._idle_lengths is None:
            self._idle_lengths = sorted({find_idle_length(layer) for layer in list_layers(model)})
        kinds = tuple((step.shortest <= length, step.longest <= length) for length in self._idle_lengths)
        io = self._get_io("device_io")
        io.graphs = self._graphs.setdefault((id(io), step.rows, kinds), CudaGraphBuffer())

    def _get_io(self, side: str) -> Any:
        """Return the inputs and outputs of the current step, on one side where they are on both."""
        io: Any = self.inputs_and_outputs
        return getattr(io.io_pairs[io.current_pair], side) if hasattr(io, "io_pairs") else io


def find_graph_refusal(model: Any) -> str | None:
    """Return why no step of a model can be captured, None where nothing is known against it."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or [SLIDING] * (getattr(config, "sliding_window", None) is not None)
    if SLIDING in kinds:
        return "the model has layers with windows, whose pages are counted otherwise"
    if not HAS_TRITON:
        return "Triton is not installed"
    for layer in list_layers(model):
        if layer.recipe.retrieve is not None or layer.temperature is not None:
            return f"{truncate(layer.description)} chooses keys or learns laws"
    return None


def prefers_graphs(model: Any, device: torch.device) -> bool:
    """Return whether a model is served with graphs by default: where transformers would serve the plain one so.

    That is with FlashAttention. With SDPA neither is padded, and short requests are the plain model's bit for bit.
    """
    flash = is_flash_attn_2_available() or is_flash_attn_3_available()
    return device.type == "cuda" and flash and model._supports_flash_attn and find_graph_refusal(model) is None


def warn_of_graphs(reason: str) -> None:
    warnings.warn(f"continuous batching: served without CUDA graphs, since {reason}", UserWarning, stacklevel=2)


def list_layers(model: nn.Module) -> list[Layer]:
    """Return the extended layers of a model."""
    return [module for module in model.modules() if isinstance(module, Layer)]
