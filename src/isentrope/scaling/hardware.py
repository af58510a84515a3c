"""Rates of devices and links, each with its source."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log

from isentrope.utils.messages import suggest

TERA, GIGA = 1e12, 1e9
Points = tuple[tuple[float, float], ...]  # (operations of a call, operations per second), by increasing operations


@dataclass(frozen=True)
class Device:
    """What one process computes with.

    Attributes:
        name: of the device.
        memory_bytes: that it has.
        linear_rate: operations per second of a model's linear layers as the hidden size goes to infinity.
        half_rate_hidden: the hidden size h₀ at half that rate: norms, activations and residuals take time
            proportional to h, products to h², so the rate is `linear_rate` · h / (h + h₀).
        dense_rates: of causal attention with near and far keys, by the operations of a call.
        window_rates: of windowed attention, the same, counted over visible pairs alone.
        choosing_rate: of the products by which `retrieve` chooses blocks.
        small_head_factor: all rates of attention at head sizes up to 64, relative to 128.
        source: of the numbers.
    """

    name: str
    memory_bytes: float
    linear_rate: float
    half_rate_hidden: float
    dense_rates: Points
    window_rates: Points
    choosing_rate: float
    small_head_factor: float
    source: str

    def linear_rate_at(self, hidden: int) -> float:
        """Return operations per second of the linear layers of a model of that hidden size."""
        return self.linear_rate * hidden / (hidden + self.half_rate_hidden)

    def head_factor(self, head_dim: int) -> float:
        """Return the rate of attention at a head size, relative to 128."""
        return self.small_head_factor if head_dim <= 64 else 1.0

    def share_cores(self, processes: int, cores: int) -> Device:
        """Return the device of one of several processes on one machine, where they have fewer cores than processes."""
        share = min(1.0, cores / processes)
        scaled = {name: getattr(self, name) * share for name in ("linear_rate", "choosing_rate")}
        dense, window = (
            tuple((operations, rate * share) for operations, rate in points)
            for points in (self.dense_rates, self.window_rates)
        )
        return replace(self, **scaled, dense_rates=dense, window_rates=window)


@dataclass(frozen=True)
class Link:
    """How processes are connected: nodes of `node_size`, fast inside, slower between.

    Attributes:
        name: of the kind of link.
        node_size: processes of a node.
        inside_bandwidth: bytes per second that a process sends to others of its node, and receives meanwhile.
        between_bandwidth: the same to other nodes; every process has an adapter of its own.
        latency: seconds before the first byte of a message.
        efficiency: share of the bandwidth that messages reach.
        source: of the numbers.
    """

    name: str
    node_size: int
    inside_bandwidth: float
    between_bandwidth: float
    latency: float
    efficiency: float
    source: str

    @property
    def inside(self) -> float:
        """Bytes per second that messages reach inside a node."""
        return self.inside_bandwidth * self.efficiency

    @property
    def between(self) -> float:
        """Bytes per second that messages of one process reach between nodes."""
        return self.between_bandwidth * self.efficiency


def interpolate_rate(points: Sequence[tuple[float, float]], operations: float) -> float:
    """Return the rate of a call, interpolated in the logarithms, and at most that of the longest call measured.

    Shorter calls may be faster for the moment, before the device reaches its power limit; a prefill takes longer than
    that.
    """
    at = bisect_left([each for each, _ in points], operations)
    if at in (0, len(points)):
        return min(points[min(at, len(points) - 1)][1], points[-1][1])
    (low, low_rate), (high, high_rate) = points[at - 1], points[at]
    weight = log(operations / low) / log(high / low)
    return min(exp((1 - weight) * log(low_rate) + weight * log(high_rate)), points[-1][1])


def points_by_length(rates: dict[int, float], operations: float, power: int) -> Points:
    """Return TFLOP/s by tokens n of a call as rates by its operations, `operations` · n^power."""
    return tuple((operations * n**power, rate * TERA) for n, rate in rates.items())


# 32 heads of 128, group "scaling" of benchmarks/results/2026-11-16-h200-8.json: dense is "ReRoPE 1024", windows are
# "window 1024". Choosing: the time of `retrieve` at 131,072 tokens in 2026-11-17-h200-decoding.txt less that of the
# keys it sees. Linear: one forward pass each of TinyLlama-1.1B (docs/results/share/tinyllama-8k) and SmolLM2-135M
# (docs/results/frontier/smollm2-1m), less the time of attention. tests/scaling/test_constants.py computes all of them.
H200 = Device(
    name="H200",
    memory_bytes=141 * GIGA,
    linear_rate=717 * TERA,
    half_rate_hidden=1707,
    dense_rates=points_by_length(
        {
            1024: 25.3, 2048: 48.4, 4096: 202.3, 8192: 474.1, 16384: 515.3, 32768: 559.2, 65536: 581.2, 131072: 543.1,
            262144: 514.2, 524288: 503.5, 1048576: 496.0,
        }, 4 * 128 * 32 / 2, 2,
    ),
    window_rates=points_by_length(
        {
            1024: 37.8, 2048: 95.8, 4096: 187.3, 8192: 274.6, 16384: 334.3, 32768: 340.8, 65536: 342.4, 131072: 318.8,
            262144: 320.0, 524288: 317.4, 1048576: 315.9,
        }, 4 * 128 * 32 * 1024, 1,
    ),
    choosing_rate=218 * TERA,
    small_head_factor=0.878,
    source="measured on one H200; memory: NVIDIA H200 datasheet",
)  # fmt: skip
# shares of the specified bandwidth, and seconds a message: assumptions, not measurements
EFFICIENCY, LATENCY = 0.8, 1e-5
NVLINK_SOURCE = "NVIDIA H200 datasheet: NVLink 900 GB/s, both directions together"
LINKS = {
    "nvlink": Link("nvlink", 1 << 20, 450 * GIGA, 450 * GIGA, LATENCY, EFFICIENCY, f"{NVLINK_SOURCE}; one domain"),
    "ndr": Link(
        "ndr", 8, 450 * GIGA, 50 * GIGA, LATENCY, EFFICIENCY,
        f"{NVLINK_SOURCE}; NVIDIA DGX H200: eight GPUs and eight ConnectX-7 of 400 Gb/s (InfiniBand NDR) a node",
    ),
}  # fmt: skip


def parse_link(text: str) -> Link:
    """Return a link by its name, or one of so many GB/s between all processes.

    Raises:
        ValueError: the text is neither.
    """
    if text in LINKS:
        return LINKS[text]
    try:
        bandwidth = float(text) * GIGA
    except ValueError:
        bandwidth = 0.0
    if not 0 < bandwidth < float("inf"):
        raise ValueError(f"link: expected {', '.join(LINKS)} or GB/s such as 25, got {text!r}{suggest(text, LINKS)}")
    return Link(f"{text} GB/s", 1 << 20, bandwidth, bandwidth, LATENCY, EFFICIENCY, "given on the command line")
