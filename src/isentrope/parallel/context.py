"""Context parallelism: a sequence spread over processes, whose attention is that of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from isentrope.core.compile import values_are_readable
from isentrope.core.partial_layout import RowTable
from isentrope.parallel.decoding import attend_to_shards, check_queries, check_recipe
from isentrope.parallel.exchanges import QKV, Output, find_ring_refusal, gather_and_attend, ring_and_attend
from isentrope.parallel.key_parts import Options
from isentrope.parallel.processes import Processes
from isentrope.parallel.rows import ShardedRows, make_mask, make_table, new_layouts, read_rows
from isentrope.parallel.split import LAYOUTS, Split, fetch
from isentrope.recipe import Recipe
from isentrope.utils.messages import format_value

EXCHANGES = ("auto", "gather", "ring")
IGNORED_LABEL = -100  # of transformers' losses
# Keys and values of a layer, of all processes together, up to which "auto" fetches them at once.
MAX_GATHERED_BYTES = 1 << 30


class SequenceParallel:
    """What the ways to share a sequence have in common: parts of batches, and the whole from parts.

    Args:
        group: processes that share a sequence: of `torch.distributed`, or a `DeviceMesh` with one dimension; all of
            them by default.
        layout: "zigzag", by which causal attention is the same work for all processes, or "contiguous".
    """

    def __init__(self, group: Any = None, layout: str = "zigzag") -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {format_value(layout)}")
        self.processes, self.layout = Processes(group), layout
        self._rows: Any = WeakTensorKeyDictionary()

    @property
    def rank(self) -> int:
        """This process, among those that share a sequence."""
        return self.processes.rank

    @property
    def size(self) -> int:
        """Number of processes that share a sequence."""
        return self.processes.size

    def split(self, length: int) -> Split:
        """Return which process has which of so many tokens.

        Raises:
            ValueError: there are fewer tokens than chunks.
        """
        chunks = self.size * (2 if self.layout == "zigzag" else 1)
        if length < chunks:
            raise ValueError(
                f"input_ids: expected at least {chunks} tokens, one for each chunk of {self.size} processes, got "
                f"{length}; pad them, or use fewer processes"
            )
        return Split(length, self.size, self.layout == "zigzag")

    def shard(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the model's keyword arguments for the part of a batch that this process has.

        All processes pass the same batch. Padding, packing and positions mean what they mean to the model in one
        process. The loss of the returned arguments is this process's share of the mean over all labels: the sum over
        processes is the loss of one process (`sum`), and the sum of gradients its gradient (`sum_gradients`).

        Args:
            input_ids: tokens, (batch, length).
            labels: of tokens, (batch, length), as for one process: the model shifts them by one.
            attention_mask: 1 for tokens and 0 for padding, (batch, length).
            position_ids: (batch, length) or (1, length).
            inputs_embeds: in place of input_ids, (batch, length, size).

        Returns:
            The arguments: tokens and `position_ids` of this process, an `attention_mask` that tells attention which
            they are, and with labels `labels`, `shift_labels` and `num_items_in_batch`.

        Raises:
            ValueError: an argument has another shape, or there are too few tokens.
        """
        name, tokens = ("input_ids", input_ids) if inputs_embeds is None else ("inputs_embeds", inputs_embeds)
        if tokens is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("input_ids: expected tokens or inputs_embeds, and not both")
        batch, length = tokens.shape[:2]
        for other, x in (("labels", labels), ("attention_mask", attention_mask), ("position_ids", position_ids)):
            if x is not None and (x.dim() != 2 or x.shape[1] != length or x.shape[0] not in (1, batch)):
                raise ValueError(f"{other}: expected shape ({batch}, {length}) like {name}, got {tuple(x.shape)}")
        split = self.split(length)
        table = make_table(batch, length, attention_mask, position_ids)
        positions = torch.arange(length, device=tokens.device)[None] if position_ids is None else position_ids
        arguments = {
            name: self._take(tokens, split),
            "position_ids": self._take(positions.expand(batch, -1), split),
            "attention_mask": make_mask(table, split, self.rank, batch, tokens.device),
        }
        if labels is not None:
            shifted = F.pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1:]
            arguments["labels"], arguments["shift_labels"] = self._take(labels, split), self._take(shifted, split)
            arguments["num_items_in_batch"] = (shifted != IGNORED_LABEL).sum()
        return arguments

    def _take(self, x: Tensor, split: Split) -> Tensor:
        return torch.cat([x[:, part.start : part.stop] for part in split.chunks(self.rank)], 1)

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the whole of what every process has a part of, in the order of tokens; gradients are summed.

        Args:
            x: this process's part, such as logits (batch, tokens, vocabulary).
            dim: along which tokens lie.
        """
        tokens = torch.tensor([x.shape[dim]], dtype=torch.int64, device=x.device)
        split = self.split(int(self.processes.sum(tokens)))
        if split.count(self.rank) != x.shape[dim]:
            raise ValueError(
                f"gather: expected {split.count(self.rank)} of {split.length} tokens along dimension {dim}, got "
                f"{x.shape[dim]}; pass what the model returned for the arguments of shard()"
            )
        return fetch(x, ((range(split.length),),) * self.size, split, self.processes, dim)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over processes, without gradients: of losses, the loss of the whole batch."""
        return self.processes.sum(x)

    def sum_gradients(self, model: nn.Module) -> None:
        """Replace the gradients of a model by their sums over processes: those of one process with the whole batch.

        DDP and FSDP average gradients over their processes themselves: there, multiply the loss by `size` instead.
        """
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        if not weights:
            return
        own = torch.tensor([weight.grad is not None for weight in weights], dtype=torch.int64, device=weights[0].device)
        # a weight that no process has used stays without gradient, or an optimizer would decay it
        for weight, used in zip(weights, self.processes.sum(own).tolist(), strict=True):
            if used:
                weight.grad = self.processes.sum(torch.zeros_like(weight) if weight.grad is None else weight.grad)

    @torch.no_grad()
    def prefill(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor | None = None, to: int | str | None = None
    ) -> tuple[Tensor, Any]:
        """Read a prompt in all processes; generation then continues in all of them together, in one, or in each alone.

            logits, cache = parallel.prefill(model, ids)
            ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), 1)
            model.generate(ids, past_key_values=cache)

        By default the cache stays where it is: a process keeps the keys and values of its own tokens, and of its share
        of new ones. All processes then call the model with the same new tokens, and get the same logits; where tokens
        are sampled, with the same seed.

        Args:
            model: extended with this object.
            input_ids: the prompt, (batch, length), the same in all processes.
            attention_mask: 1 for tokens and 0 for padding, (batch, length).
            to: the rank of a process that gets the whole cache, and generates by itself; "each": every process gets the
                whole; by default each keeps its part.

        Returns:
            The logits of the next token, (batch, vocabulary), and the cache: None in processes that do not generate.

        Raises:
            ValueError: a row is padded on the right, or the recipe needs all keys in one place (`retrieve`).
        """
        from transformers import Cache, DynamicCache

        from isentrope.parallel.cache import ShardedLayer, copy_mark

        if to not in (None, "each", *range(self.size)):
            raise ValueError(f"to: expected a rank below {self.size}, 'each' or None, got {format_value(to)}")
        if to is None:
            for module in model.modules():
                if isinstance(recipe := getattr(module, "recipe", None), Recipe):
                    check_recipe(recipe)
        if attention_mask is not None and not bool(attention_mask[:, -1].all()):
            raise ValueError("attention_mask: expected rows that end with a token, got padding there; pad on the left")
        # without a config no layer drops the beginning of this process's part
        own, config = DynamicCache(), model.config.get_text_config(decoder=True)
        # as `generate` counts them: the cache may hold keys that the model has rotated
        positions = None if attention_mask is None else (attention_mask.to(torch.int64).cumsum(1) - 1).clamp_min(0)
        part = self.shard(input_ids, attention_mask=attention_mask, position_ids=positions)
        logits = model(**part, past_key_values=own, logits_to_keep=1).logits[:, -1]
        split, cached = self.split(input_ids.shape[1]), (range(input_ids.shape[1]),)
        is_last = split.chunks(self.rank)[-1].stop == split.length
        logits = self.sum(logits if is_last else torch.zeros_like(logits))
        layers: list[Any] = own.layers
        if to is None:
            parts = Cache(layers=[ShardedLayer(x.keys, x.values, split, self.rank) for x in layers])
            return logits, copy_mark(own, parts)
        wanted = tuple(cached if to in ("each", rank) else () for rank in range(self.size))
        whole = DynamicCache(config=config)
        for index, layer in enumerate(layers):
            keys, values = (fetch(x, wanted, split, self.processes) for x in (layer.keys, layer.values))
            layer.keys = layer.values = None
            if wanted[self.rank]:
                whole.update(keys, values, index)
        return logits, copy_mark(own, whole) if wanted[self.rank] else None

    def collate(self, collator: Callable[[Any], Any]) -> Callable[[Any], dict[str, Tensor]]:
        """Return a data collator whose batches are this process's part, for a `Trainer` that reads the same rows.

        Args:
            collator: makes a batch of input_ids, labels and, if it likes, attention_mask and position_ids.
        """

        def collate_and_shard(rows: Any) -> dict[str, Tensor]:
            part = self.shard(**collator(rows))
            part.pop("num_items_in_batch", None)  # a Trainer counts labels itself, over all processes
            return part

        return collate_and_shard

    def read(self, mask: Tensor, query: Tensor, key: Tensor) -> ShardedRows:
        """Return the rows that a mask of `shard` belongs to, or of a cache in parts; the first layer reads them.

        Raises:
            ValueError: keys come from another cache, new tokens differ from process to process, or a graph is being
                compiled.
        """
        if not values_are_readable(mask):
            raise ValueError("context parallel: not supported in a compiled graph; call the model uncompiled")
        rows: ShardedRows | None = self._rows.get(mask)
        if rows is None:
            rows = read_rows(mask, self.processes, self.layout == "zigzag")
            if rows.cached:
                check_queries(query, self.processes)
            self._rows[mask] = rows
        count = rows.split.count(self.rank)
        if key.shape[2] != count:
            raise ValueError(
                f"context parallel: expected {count} keys, those of the tokens of this process, got "
                f"{key.shape[2]}; begin with an empty cache"
            )
        return rows

    def read_balanced(self, position_ids: Tensor | None, key: Tensor) -> ShardedRows:
        """Return the rows whose tokens torch's `context_parallel` has spread, which takes no masks.

        Raises:
            ValueError: positions are not those of tokens 0, 1, 2 … as this layout spreads them.
        """
        split = self.split(key.shape[2] * self.size)
        slots = torch.cat([torch.arange(r.start, r.stop) for r in split.chunks(self.rank)])
        if position_ids is None or not torch.equal(position_ids.cpu(), slots.expand_as(position_ids)):
            raise ValueError(
                f"context parallel: expected position_ids 0, 1, 2 … spread over {self.size} processes in the layout "
                f"{self.layout!r}, got others; leave torch's context_parallel out, and pass what shard() gives"
            )
        return ShardedRows(split, self.rank, key.shape[0], RowTable(split.length), new_layouts(self.size))

    def attend(self, qkv: QKV, rows: ShardedRows, options: Options, need_lse: bool = False) -> Output:
        """Return the output of this process's queries, and their log-sum-exp if it is needed."""
        raise NotImplementedError

    def decode(self, qkv: QKV, rows: ShardedRows, options: Options) -> Output:
        """Return output and log-sum-exp of new tokens over a cache in parts, the same in all processes.

        Raises:
            ValueError: gradients are wanted, or the recipe needs all keys in one place.
        """
        check_recipe(options.recipe)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*qkv, *options.learned)):
            raise ValueError("context parallel: a cache in parts is read without gradients; use torch.no_grad()")
        return attend_to_shards(qkv, options, rows, self.processes)

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallel:
        return self  # a copy of a model runs in the same processes


class ContextParallel(SequenceParallel):
    """A sequence spread over processes, each of which attends with its queries to the keys of all.

    Args:
        group: as for `SequenceParallel`.
        layout: as for `SequenceParallel`.
        exchange: "gather": fetch all keys that are seen, and no others, at once; of a window those of neighbours.
            "ring": the keys of one process after another, the next on their way meanwhile: memory is linear in the
            tokens of a process. "auto": gather where keys and values of a layer take at most 1 GiB, else ring where
            the recipe allows it.

    Raises:
        ValueError: `torch.distributed` was not initialised, or an option is not one of these.
    """

    def __init__(self, group: Any = None, layout: str = "zigzag", exchange: str = "auto") -> None:
        super().__init__(group, layout)
        if exchange not in EXCHANGES:
            raise ValueError(f"exchange: expected one of {', '.join(EXCHANGES)}, got {format_value(exchange)}")
        self.exchange = exchange

    def attend(self, qkv: QKV, rows: ShardedRows, options: Options, need_lse: bool = False) -> Output:
        run = ring_and_attend if self._takes_ring(qkv, options, rows) else gather_and_attend
        return run(qkv, options, rows, self.processes, need_lse)

    def _takes_ring(self, qkv: QKV, options: Options, rows: ShardedRows) -> bool:
        if self.exchange == "gather":
            return False
        refusal = find_ring_refusal(options, rows)
        if self.exchange == "ring":
            if refusal is not None:
                raise ValueError(f"exchange: 'ring' is not possible, since {refusal}; use 'gather' or 'auto'")
            return True
        size = sum(x[:, :, 0].numel() * x.element_size() for x in qkv[1:]) * rows.split.length
        return refusal is None and size > MAX_GATHERED_BYTES
