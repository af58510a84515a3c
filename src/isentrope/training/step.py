"""One optimiser step: forward, backward, clip, update; on a GPU as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from queue import Queue
from threading import Event, Thread
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from isentrope.core.compile import copy_function

Batch = dict[str, Tensor]
WARMUP_STEPS = 3  # before a graph is captured: compilation, and the optimiser's first state


class Stepper:
    """`stepper(batch, rate)` updates the weights and returns the loss on the device, without synchronizing.

    With one process on a GPU the whole step, optimiser included, is one CUDA graph. Several processes split a batch by
    rows and average their gradients.

    Args:
        model: In training mode.
        accelerator: Says which device and how many processes.
        decay: Weight decay.
        clip: Largest gradient norm; 0 for no limit.
        bf16: Run the forward under bfloat16 autocast.
        accumulate: Parts that a batch is processed in.
        compile: Compile the forward and backward.
    """

    def __init__(
        self,
        model: nn.Module,
        accelerator: Accelerator,
        *,
        decay: float,
        clip: float,
        bf16: bool,
        accumulate: int,
        compile: bool,
    ) -> None:
        self.accelerator, self.device = accelerator, accelerator.device
        self.clip, self.bf16, self.accumulate = clip, bf16, accumulate
        cuda = self.device.type == "cuda"
        self.plain = model.to(self.device)
        self.model = accelerator.prepare_model(self.plain) if accelerator.num_processes > 1 else self.plain
        self.rate = torch.zeros((), device=self.device)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.rate if cuda else 0.0, weight_decay=decay, fused=cuda, capturable=cuda
        )
        self.parameters = [x for x in model.parameters() if x.requires_grad]
        self.loss: Callable[[Batch], Tensor] = self._compute_loss
        if compile:  # a new function for each run, since code compiled for one model does not fit the next
            self.loss = torch.compile(copy_function(lambda batch: self._compute_loss(batch)), dynamic=False)
        self.captures = cuda and accelerator.num_processes == 1
        self.stream: torch.cuda.Stream | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: Batch = {}
        self.output = torch.zeros((), device=self.device)
        self.steps_taken = 0

    def __call__(self, batch: Batch, rate: float) -> Tensor:
        """Update the weights with this process' rows of a batch, on the host, at learning rate `rate`."""
        if self.device.type == "cuda":
            self.rate.fill_(rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        self.steps_taken += 1
        if not self.captures:
            return self._update({name: x.to(self.device, non_blocking=True) for name, x in batch.items()})
        return self._replay(batch)

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the loss of this process' rows, without dropout."""
        self.plain.eval()
        with torch.no_grad():
            loss = self._compute_loss({name: x.to(self.device, non_blocking=True) for name, x in batch.items()})
        self.plain.train()
        return loss

    def _compute_loss(self, batch: Batch) -> Tensor:
        kind = self.device.type
        with torch.autocast(kind, torch.bfloat16) if self.bf16 else nullcontext():
            logits = self.model(**{name: x for name, x in batch.items() if name != "labels"}).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())

    def _update(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        total: Any = 0.0
        rows = len(batch["labels"]) // self.accumulate
        for part in range(self.accumulate):
            micro = {name: x[part * rows : (part + 1) * rows] for name, x in batch.items()}
            last = part == self.accumulate - 1
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                loss = self.loss(micro) / self.accumulate
                loss.backward()
            total = total + loss.detach()
        if self.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        return total

    def _replay(self, batch: Batch) -> Tensor:
        """Run the step as a CUDA graph over static inputs, captured after the warm-up steps."""
        if not self.inputs:
            self.inputs = {name: x.to(self.device) for name, x in batch.items()}
        for name, x in batch.items():
            self.inputs[name].copy_(x, non_blocking=True)
        if self.graph is not None:
            self.graph.replay()
        elif self.steps_taken <= WARMUP_STEPS:
            self.stream = self.stream or torch.cuda.Stream()
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.output.copy_(self._update(self.inputs))
            torch.cuda.current_stream().wait_stream(self.stream)
        else:
            self.optimizer.zero_grad()
            self.graph = torch.cuda.CUDAGraph()
            # the stream of the warm-up's autograd nodes; thread_local, as another thread pins the next batches
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.output.copy_(self._update(self.inputs))
            self.graph.replay()  # capturing does not run the step
        return self.output.clone()


@contextmanager
def prefetch(
    make: Callable[[int], Batch], first: int, end: int, pin: bool, depth: int = 8
) -> Iterator[Iterator[Batch]]:
    """Yield an iterator over make(first) … make(end - 1), made by another thread a few steps ahead.

    The thread is joined on exit: one still inside torch when the interpreter ends would abort the process.

    Args:
        make: Makes the batch of a step.
        first: First step.
        end: Step after the last.
        pin: Pin the batches' memory.
        depth: Batches made ahead.
    """
    queue: Queue[Any] = Queue(depth)
    closed = Event()

    def produce() -> None:
        try:
            for step in range(first, end):
                batch = make(step)
                queue.put({name: x.pin_memory() for name, x in batch.items()} if pin else batch)
                if closed.is_set():
                    return
        except BaseException as error:  # raised by the consumer
            queue.put(error)

    def consume() -> Iterator[Batch]:
        for _ in range(first, end):
            item = queue.get()
            if isinstance(item, BaseException):
                raise item
            yield item

    thread = Thread(target=produce, daemon=True)
    thread.start()
    try:
        yield consume()
    finally:
        closed.set()
        while not queue.empty():  # unblocks the thread, which then sees `closed`
            queue.get_nowait()
        thread.join()
