"""The cost model: seconds and bytes of a prefill with the text spread over processes.

Symbols: n tokens, P processes, m = n / P tokens each; L layers, h hidden size, H query and K key heads of size d,
f inner size of feed-forward layers; b bytes a number; s = 2 K d b bytes of the keys and values of one token.
"""

from __future__ import annotations

from dataclasses import dataclass

from isentrope.evaluation.cost import HIDDEN_STATES
from isentrope.scaling.hardware import Device, Link, interpolate_rate
from isentrope.scaling.shape import ModelShape
from isentrope.scaling.visibility import Visibility, count_busiest
from isentrope.utils.messages import suggest

EXCHANGES = ("gather", "all-gather", "ring", "ulysses")
ACCUMULATOR_BYTES = 4  # partial results of a ring are merged in fp32


@dataclass(frozen=True)
class Setup:
    """A text of `tokens` over `processes`.

    Attributes:
        tokens: n.
        processes: P.
        exchange: "gather", all keys and values that are seen at once, straight from the process that has them, as
            `ContextParallel(exchange="gather")` does; "all-gather", the same by a collective that takes them into each
            node once; "ring", those of one process after another; "ulysses", heads for tokens and back.
        layout: "zigzag" or "contiguous".
    """

    tokens: int
    processes: int
    exchange: str
    layout: str = "zigzag"

    def __post_init__(self) -> None:
        for name in ("tokens", "processes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if self.exchange not in EXCHANGES:
            raise ValueError(
                f"exchange: expected one of {', '.join(EXCHANGES)}, got {self.exchange!r}"
                f"{suggest(self.exchange, EXCHANGES)}"
            )


@dataclass(frozen=True)
class Cost:
    """A prediction for the busiest process.

    Attributes:
        seconds: of the prefill.
        linear_seconds: in linear layers.
        attention_seconds: in attention, choosing far keys included.
        exchange_seconds: for which the link carries keys, values and heads, hidden or not.
        waiting_seconds: for which computation waits for the link.
        layer_bytes: that a process receives in one layer.
        weight_bytes: of weights in memory.
        cache_bytes: of its keys and values, for the tokens that are generated later.
        activation_bytes: of hidden states at their peak.
        buffer_bytes: of the exchange.
        sharded: whether every process holds a share of the weights alone.
    """

    seconds: float
    linear_seconds: float
    attention_seconds: float
    exchange_seconds: float
    waiting_seconds: float
    layer_bytes: float
    weight_bytes: float
    cache_bytes: float
    activation_bytes: float
    buffer_bytes: float
    sharded: bool

    @property
    def memory_bytes(self) -> float:
        """Bytes at the peak."""
        return self.weight_bytes + self.cache_bytes + self.activation_bytes + self.buffer_bytes


@dataclass(frozen=True)
class Exchange:
    """The exchange of one layer: bytes that a process receives, of buffers, and seconds of a step of the link."""

    received: float
    buffers: float
    seconds: float
    steps: int = 1
    hidden: bool = False  # whether a step is sent while the previous one is computed with


def list_exchanges(visibility: Visibility) -> tuple[str, ...]:
    """Return the ways of exchange for such attention: a ring has no use where only neighbours' keys are seen, and
    cannot choose among all keys."""
    if visibility.kind == "dense":
        return EXCHANGES
    return ("gather", "ulysses") if visibility.kind == "windowed" else ("gather", "all-gather", "ulysses")


def predict(shape: ModelShape, visibility: Visibility, setup: Setup, device: Device, link: Link) -> Cost:
    """Predict time and memory of a prefill.

    Linear layers take 2 m (weights of a layer) / rate. Attention takes 4 d H (visible pairs of the busiest process) /
    rate; where far keys are chosen, plus 4 d H (pairs outside the window) / (2 pool) / rate of choosing. Attention
    waits for what is gathered, and for heads. In a ring of P steps, block i + 1 travels while block i is computed with:
    attention / P + (P - 1) max(attention / P, one block on the link).

    Weights are replicated where they take at most half of the memory, else sharded: those of the next layer are
    gathered over the same link while a layer computes.

    Args:
        shape: of the model.
        visibility: which keys queries see.
        setup: tokens, processes and exchange.
        device: of each process.
        link: between them.

    Raises:
        ValueError: the exchange does not work with these heads or keys.
    """
    n, processes = setup.tokens, setup.processes
    m = -(-n // processes)
    linear = 2.0 * m * shape.layer_weights / device.linear_rate_at(shape.hidden)
    attention = compute_attention_seconds(shape, visibility, setup, device)
    exchange = plan_exchange(shape, visibility, setup, link)
    sends = exchange.steps - 1 if exchange.hidden else 1
    on_link = sends * exchange.seconds
    waiting = sends * max(0.0, exchange.seconds - (attention / exchange.steps if exchange.hidden else 0.0))
    size = shape.dtype_bytes
    sharded = processes > 1 and shape.weights * size > device.memory_bytes / 2
    gathered = shape.layer_weights * size * (processes - 1) / processes if sharded else 0.0
    weight_bytes = float(shape.weights * size)
    if sharded:
        weight_bytes = weight_bytes / processes + 2 * shape.layer_weights * size
    waiting += max(0.0, on_link + gather_seconds(gathered, processes, link) - linear - attention - waiting)
    cached = m if visibility.kind != "windowed" or visibility.budget is None else min(m, visibility.budget)
    return Cost(
        seconds=shape.layers * (linear + attention + waiting),
        linear_seconds=shape.layers * linear,
        attention_seconds=shape.layers * attention,
        exchange_seconds=shape.layers * on_link,
        waiting_seconds=shape.layers * waiting,
        layer_bytes=exchange.received,
        weight_bytes=weight_bytes,
        cache_bytes=float(shape.layers * cached * shape.kv_bytes),
        activation_bytes=float(m * (HIDDEN_STATES * shape.hidden + 2 * shape.feed_forward) * size),
        buffer_bytes=exchange.buffers,
        sharded=sharded,
    )


def compute_attention_seconds(shape: ModelShape, visibility: Visibility, setup: Setup, device: Device) -> float:
    """Return the seconds of one layer's attention in the busiest process.

    The rate is that of a call with as many operations as one of the process's own: one call for each of its parts, and
    in a ring for each of them in each of P steps. Under Ulysses one call has all queries, for a part of the heads.
    """
    if setup.exchange == "ulysses":
        pairs, far = (count / setup.processes for count in count_busiest(visibility, setup.tokens, 1, setup.layout))
    else:
        pairs, far = count_busiest(visibility, setup.tokens, setup.processes, setup.layout)
    unit = 4.0 * shape.head_dim * shape.heads
    calls = 1
    if setup.processes > 1 and setup.exchange != "ulysses":
        calls = (2 if setup.layout == "zigzag" else 1) * (setup.processes if setup.exchange == "ring" else 1)
    rates = device.dense_rates if visibility.kind == "dense" else device.window_rates
    seconds = unit * pairs / interpolate_rate(rates, unit * pairs / calls)
    if visibility.pool is not None:
        seconds += unit * far / (2 * visibility.pool) / device.choosing_rate
    return seconds / device.head_factor(shape.head_dim)


def plan_exchange(shape: ModelShape, visibility: Visibility, setup: Setup, link: Link) -> Exchange:
    """Return what one layer's exchange costs.

    Bytes that a process receives, at most: (P - 1) m s of keys and values; where queries see a window, window - 1
    tokens before each of its parts, and the first tokens. Under Ulysses (P - 1) / P of q, k, v and output of its m
    tokens, m d (2 H + 2 K) b.

    Raises:
        ValueError: the exchange does not work with these heads or keys.
    """
    n, processes = setup.tokens, setup.processes
    m = -(-n // processes)
    if setup.exchange not in list_exchanges(visibility):
        known = ", ".join(list_exchanges(visibility))
        raise ValueError(f"exchange: expected one of {known} for {visibility.kind} keys, got {setup.exchange!r}")
    if setup.exchange == "ulysses":
        kv_heads = count_ulysses_heads(shape, processes)
        own = m * shape.head_dim * (2 * shape.heads + 2 * kv_heads) * shape.dtype_bytes
        received = own * (processes - 1) / processes
        return Exchange(received, 2.0 * own if processes > 1 else 0.0, send_seconds(received, processes, link))
    if processes == 1:
        return Exchange(0.0, 0.0, 0.0)
    block = m * shape.kv_bytes
    if visibility.kind == "windowed":
        assert visibility.window is not None and visibility.budget is not None
        parts = 2 if setup.layout == "zigzag" else 1
        before = parts * (visibility.window - 1) + visibility.budget - visibility.window
        received = float(min(before, n - m) * shape.kv_bytes)
        return Exchange(received, received, received / slowest_hop(processes, link) + parts * link.latency)
    if setup.exchange == "ring":
        seconds = block / slowest_hop(processes, link) + link.latency
        accumulator = m * shape.heads * (shape.head_dim + 1) * ACCUMULATOR_BYTES
        received = float((processes - 1) * block)
        return Exchange(received, 2.0 * block + accumulator, seconds, processes, hidden=True)
    received = float((processes - 1) * block)
    count_seconds = gather_seconds if setup.exchange == "all-gather" else send_seconds
    return Exchange(received, received + block, count_seconds(received, processes, link))


def count_ulysses_heads(shape: ModelShape, processes: int) -> int:
    """Return the key heads that Ulysses sends: K, or P copies where there are fewer heads than processes.

    Raises:
        ValueError: heads cannot be divided among the processes.
    """
    heads, kv_heads = shape.heads, shape.kv_heads
    if heads % processes or (kv_heads % processes and processes % kv_heads):
        raise ValueError(
            f"ulysses: expected processes that divide {heads} query and {kv_heads} key heads, got {processes}; "
            "use ring or gather"
        )
    return max(kv_heads, processes)


def slowest_hop(processes: int, link: Link) -> float:
    """Return bytes per second of the slowest step to the next process: one adapter between two nodes."""
    return link.inside if processes <= link.node_size else link.between


def send_seconds(received: float, processes: int, link: Link) -> float:
    """Return the seconds in which each process receives so many bytes, as many from every other, over its own links."""
    if processes == 1 or not received:
        return 0.0
    inside = min(processes, link.node_size)
    each = received / (processes - 1)
    seconds = max(each * (inside - 1) / link.inside, each * (processes - inside) / link.between)
    return seconds + (processes - 1) * link.latency


def gather_seconds(received: float, processes: int, link: Link) -> float:
    """Return the seconds in which each process receives so many bytes from all others.

    What comes from other nodes enters a node once, over the adapters of all its processes, and is shared inside it.
    """
    if processes == 1 or not received:
        return 0.0
    seconds = received / link.inside
    if processes > link.node_size:
        nodes = processes / link.node_size
        from_others = received * processes / (processes - 1) * (nodes - 1) / nodes
        seconds = max(seconds, from_others / (link.node_size * link.between))
    return seconds + (processes - 1) * link.latency
