"""One optimiser step: forward, backward, clip, update, as fast as the device allows."""

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
WARM = 3  # steps before a graph is captured: compilation, and the optimiser's first state


class Stepper:
    """`step(batch, rate)` updates the weights and returns the loss, a tensor on the device that nobody waits for.

    compile: the forward and backward. On a GPU and with one process the whole step, optimiser included, is one CUDA
    graph, compiled or not: the host has nothing to do but hand over the next batch. Several processes share a batch by
    rows and average their gradients.
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
        self.loss: Callable[[Batch], Tensor] = self._loss
        if compile:  # as a function of this run's own: what is compiled for one model is of no use to the next
            self.loss = torch.compile(copy_function(lambda batch: self._loss(batch)), dynamic=False)
        self.captures = cuda and accelerator.num_processes == 1
        self.side: torch.cuda.Stream | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: Batch = {}
        self.output = torch.zeros((), device=self.device)
        self.taken = 0

    def __call__(self, batch: Batch, rate: float) -> Tensor:
        """batch: this process' rows, on the host. rate: the learning rate of this step."""
        if self.device.type == "cuda":
            self.rate.fill_(rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        self.taken += 1
        if not self.captures:
            return self._update({name: x.to(self.device, non_blocking=True) for name, x in batch.items()})
        return self._replay(batch)

    def evaluate(self, batch: Batch) -> Tensor:
        """The loss of this process' rows, without dropout."""
        self.plain.eval()
        with torch.no_grad():
            loss = self._loss({name: x.to(self.device, non_blocking=True) for name, x in batch.items()})
        self.plain.train()
        return loss

    def _loss(self, batch: Batch) -> Tensor:
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
        """The step as a graph over inputs that stay where they are."""
        if not self.inputs:
            self.inputs = {name: x.to(self.device) for name, x in batch.items()}
        for name, x in batch.items():
            self.inputs[name].copy_(x, non_blocking=True)
        if self.graph is not None:
            self.graph.replay()
        elif self.taken <= WARM:
            self.side = self.side or torch.cuda.Stream()
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                self.output.copy_(self._update(self.inputs))
            torch.cuda.current_stream().wait_stream(self.side)
        else:
            self.optimizer.zero_grad()
            self.graph = torch.cuda.CUDAGraph()
            # on the stream where autograd's nodes were made, while another thread may pin the next batches
            with torch.cuda.graph(self.graph, stream=self.side, capture_error_mode="thread_local"):
                self.output.copy_(self._update(self.inputs))
            self.graph.replay()  # capturing runs nothing
        return self.output.clone()


@contextmanager
def ahead(make: Callable[[int], Batch], first: int, end: int, pin: bool, depth: int = 8) -> Iterator[Iterator[Batch]]:
    """make(first) … make(end - 1), made by another thread a few steps before they are asked for.

    The thread ends before this is left: one that is inside torch when the interpreter ends aborts the process.
    """
    queue: Queue[Any] = Queue(depth)
    closed = Event()

    def work() -> None:
        try:
            for step in range(first, end):
                batch = make(step)
                queue.put({name: x.pin_memory() for name, x in batch.items()} if pin else batch)
                if closed.is_set():
                    return
        except BaseException as error:  # raised where the batch is asked for
            queue.put(error)

    def made() -> Iterator[Batch]:
        for _ in range(first, end):
            item = queue.get()
            if isinstance(item, BaseException):
                raise item
            yield item

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        yield made()
    finally:
        closed.set()
        while not queue.empty():  # it may wait to hand one over, and looks up after that
            queue.get_nowait()
        thread.join()
