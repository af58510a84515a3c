"""Two ways to bring keys to queries: all that are seen at once, or shard after shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from isentrope.core.dtypes import accumulation_dtype
from isentrope.functional import attention
from isentrope.parallel.key_parts import KeyPart, Options, PartwiseCall, attend_to_parts
from isentrope.parallel.processes import Processes
from isentrope.parallel.rows import ShardedRows
from isentrope.parallel.split import Exchange, Ranges, add_tokens, fetch, intersect_ranges, join_ranges, plan_exchange
from isentrope.parallel.visible import combine_masks, find_keys, join_all

QKV = tuple[Tensor, Tensor, Tensor]
Output = tuple[Tensor, Tensor | None]


class Chunk(NamedTuple):
    """Consecutive queries of one process.

    Attributes:
        own: the slots whose output the process needs.
        queries: those and neighbours, where queries choose far keys in groups.
        keys: slots that these queries see.
    """

    own: range
    queries: range
    keys: Ranges


def find_ring_refusal(options: Options, rows: ShardedRows) -> str | None:
    """Return why keys cannot arrive shard after shard, or None if they can."""
    recipe = options.recipe
    if recipe.retrieve is not None:
        return f"{recipe.retrieve} chooses among all keys"
    law = next((law for law in recipe.temperatures if hasattr(law, "by_entropy")), None)
    if law is not None:
        return f"{law} needs the entropy over all keys first"
    if options.jumping and rows.table.positions is not None:
        return "position_ids that jump are searched among all keys"
    return None


def plan_chunks(options: Options, rows: ShardedRows, rank: int) -> list[Chunk]:
    """Return the chunks of a process, each with the slots of the keys that its queries see."""
    recipe, table = options.recipe, rows.count_from(options.jumping)
    region = combine_masks((recipe.mask, options.mask), options.causal)
    # a group of queries chooses together: its members in other processes take part
    margin = 0 if recipe.retrieve is None else recipe.retrieve.queries - 1
    chunks = []
    for own in rows.chunks(rank):
        queries = range(max(0, own.start - margin), min(table.length, own.stop + margin))
        keys = find_keys(region, queries, table)
        in_parts = find_ring_refusal(options, rows) is None
        chunks.append(Chunk(own, queries, keys if in_parts else join_all(keys)))
    return chunks


def gather_and_attend(
    qkv: QKV, options: Options, rows: ShardedRows, processes: Processes, need_lse: bool = False
) -> Output:
    """Fetch every key that the queries of this process see, and no other; then attend chunk by chunk."""
    q, k, v = qkv
    plans = [plan_chunks(options, rows, rank) for rank in range(processes.size)]
    wanted = tuple(join_ranges(one for chunk in chunks for one in chunk.keys) for chunks in plans)
    fetched = fetch(torch.cat((k, v), -1), wanted, rows.split, processes)
    keys, values = fetched.split((k.shape[-1], v.shape[-1]), -1)
    slots, chunks = wanted[processes.rank], plans[processes.rank]
    parts: Sequence[Tensor] = q.split([len(chunk.own) for chunk in chunks], 2)
    if options.recipe.retrieve is not None:
        parts = _add_neighbours(parts, plans, rows, processes)
    outputs: list[Output] = []
    out: Tensor
    lse: Tensor | None
    for chunk, part in zip(chunks, parts, strict=True):
        if len(chunk.keys) > 1:
            call = PartwiseCall(options, rows, ((chunk.queries, chunk.keys),), LocalKeys(slots))
            out, lse = attend_to_parts(call, part, keys, values)
        else:
            own = _take(keys, slots, chunk.keys[0]), _take(values, slots, chunk.keys[0])
            layout = rows.get_partial(chunk.queries, chunk.keys[0], options.jumping, True, q.device)
            out, lse = _attend((part, *own), options, layout, need_lse)
        kept = slice(chunk.own.start - chunk.queries.start, chunk.own.stop - chunk.queries.start)
        outputs.append((out[:, :, kept], None if lse is None else lse[:, :, kept]))
    lses = [lse for _, lse in outputs if lse is not None]
    return torch.cat([out for out, _ in outputs], 2), torch.cat(lses, 2) if lses else None


def _attend(qkv: QKV, options: Options, layout: object, need_lse: bool) -> Output:
    result = attention(
        *qkv, options.recipe, causal=options.causal, mask=options.mask, layout=layout,  # type: ignore[arg-type]
        scale=options.scale, backend=options.backend, return_lse=need_lse,
    )  # fmt: skip
    return (result[0], result[1].lse) if need_lse else (result, None)


def _take(x: Tensor, slots: Ranges, wanted: range) -> Tensor:
    """Return the tokens of one range from those of several, (…, tokens, size)."""
    first = 0
    for one in slots:
        if one.start <= wanted.start and wanted.stop <= one.stop:
            start = first + wanted.start - one.start
            return x[:, :, start : start + len(wanted)]
        first += len(one)
    raise AssertionError(f"{wanted} is not in {slots}")


def _add_neighbours(
    parts: Sequence[Tensor], plans: list[list[Chunk]], rows: ShardedRows, processes: Processes
) -> list[Tensor]:
    """Return the queries of each chunk with its neighbours', which help to choose and have no gradients."""

    def find_edges(chunk: Chunk) -> tuple[range, range]:
        return range(chunk.queries.start, chunk.own.start), range(chunk.own.stop, chunk.queries.stop)

    wanted = tuple(join_ranges(edge for chunk in chunks for edge in find_edges(chunk)) for chunks in plans)
    fetched = fetch(torch.cat(list(parts), 2).detach(), wanted, rows.split, processes)
    widened = []
    for chunk, part in zip(plans[processes.rank], parts, strict=True):
        before, after = (
            _take(fetched, wanted[processes.rank], edge) if edge else part[:, :, :0].detach()
            for edge in find_edges(chunk)
        )
        widened.append(torch.cat((before, part, after), 2))
    return widened


@dataclass(eq=False)
class LocalKeys:
    """Parts that are all here: consecutive slots of k and v."""

    slots: Ranges
    gradients: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def stream(self, k: Tensor, v: Tensor) -> Iterator[tuple[KeyPart, ...]]:
        sizes = [len(one) for one in self.slots]
        yield tuple(map(KeyPart, self.slots, k.split(sizes, 2), v.split(sizes, 2)))

    def give_back(self, step: int, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.gradients = list(gradients)

    def collect(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        dk, dv = (torch.cat(parts, 2) for parts in zip(*self.gradients, strict=True))
        self.gradients = []
        return dk, dv


def ring_and_attend(
    qkv: QKV, options: Options, rows: ShardedRows, processes: Processes, need_lse: bool = False
) -> Output:
    """Attend to the keys of one process after another, the next on their way meanwhile; memory is linear in a shard."""
    plans = [plan_chunks(options, rows, rank) for rank in range(processes.size)]
    seen = tuple((chunk.queries, chunk.keys) for chunk in plans[processes.rank])
    wanted = tuple(join_ranges(one for chunk in chunks for one in chunk.keys) for chunks in plans)
    call = PartwiseCall(options, rows, seen, RingKeys(wanted, rows, processes))
    out, lse = attend_to_parts(call, *qkv)
    return out, lse if need_lse else None


@dataclass(eq=False)
class RingKeys:
    """The keys of one process after another: at step t those of process rank - t, as far as this one needs them.

    none: gradients of no tokens, for steps at which this process needs none.
    """

    wanted: tuple[Ranges, ...]
    rows: ShardedRows
    processes: Processes
    totals: list[Tensor] = field(default_factory=list)
    none: Tensor = field(default_factory=lambda: torch.empty(0))

    def plan(self, step: int) -> tuple[Exchange, Ranges]:
        """Return what is sent and received at a step, and the slots received."""
        split, size = self.rows.split, self.processes.size
        wanted = tuple(intersect_ranges(split.chunks((rank - step) % size), self.wanted[rank]) for rank in range(size))
        return plan_exchange(split, wanted, self.processes.rank), wanted[self.processes.rank]

    def stream(self, k: Tensor, v: Tensor) -> Iterator[tuple[KeyPart, ...]]:
        own = torch.cat((k, v), -1).movedim(2, 0).contiguous()
        self.none = own.new_empty((0, *own.shape[1:]), dtype=accumulation_dtype(own))
        coming = self._start(own, 0)
        for step in range(self.processes.size):
            tokens, wait, slots = coming
            wait()
            if step + 1 < self.processes.size:
                coming = self._start(own, step + 1)
            parts = tokens.movedim(0, 2).split([len(one) for one in slots], 2)
            yield tuple(
                KeyPart(one, *part.split((k.shape[-1], v.shape[-1]), -1))
                for one, part in zip(slots, parts, strict=True)
            )

    def _start(self, own: Tensor, step: int) -> tuple[Tensor, Callable[[], object], Ranges]:
        plan, slots = self.plan(step)
        buffer = own.index_select(0, plan.source.to(own.device))
        tokens, wait = self.processes.exchange(buffer, plan.sent, plan.received, wait=False)
        return tokens, wait, slots  # all from one process, so in the order of slots

    def give_back(self, step: int, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        plan, _ = self.plan(step)
        parts = [self.none, *(torch.cat(pair, -1).movedim(2, 0) for pair in gradients)]
        own = self.rows.split.count(self.processes.rank)
        returned, _ = self.processes.exchange(torch.cat(parts), plan.received, plan.sent)
        self.totals.append(add_tokens(returned, plan, own))

    def collect(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        total = sum(self.totals[1:], self.totals[0]).movedim(0, 2)
        self.totals = []
        dk, dv = total.split((k.shape[-1], v.shape[-1]), -1)
        return dk, dv
