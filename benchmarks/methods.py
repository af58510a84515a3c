"""The methods that are measured, by their recipes."""

from __future__ import annotations

from dataclasses import dataclass

from measure import Sizes


@dataclass(frozen=True)
class Method:
    """A recipe, and how many keys its mask leaves: sinks and a window, or all."""

    name: str
    recipe: str
    window: int | None = None
    sinks: int = 0

    def flops(self, n: int, size: Sizes) -> float:
        """Multiplications and additions in q·k and p·v of the pairs that a causal mask and the window leave."""
        seen = n if self.window is None else min(n, self.window + self.sinks)
        return 4.0 * (seen * n - seen * (seen - 1) // 2) * size.size * size.heads


def infoscale(size: Sizes, name: str, position: str, score: str = "") -> Method:
    return Method(name, f"{position}+infoscale:train_length={size.train_length}{score}")


def folded(size: Sizes) -> dict[str, Method]:
    """Methods that change q and k alone."""
    cosine = "+cosine:alpha=128"
    return {
        "InfoScale": infoscale(size, "InfoScale + RoPE", "rope"),
        "PI": infoscale(size, "InfoScale + PI", "pi:factor=16"),
        "YaRN": infoscale(size, "InfoScale + YaRN", "yarn:factor=16"),
        "CosScale": infoscale(size, "CosScale + InfoScale", "rope", cosine),
    }


def branched(window: int) -> list[Method]:
    """Methods whose positions are of two kinds, near and far."""
    return [
        Method(f"ReRoPE {window}", f"rerope:window={window}"),
        Method(f"Leaky ReRoPE {window}", f"leakyrerope:window={window}"),
        Method(f"SelfExtend {window}/8", f"selfextend:window={window},group=8"),
    ]


def mapped(window: int) -> list[Method]:
    """Methods whose far positions follow from the length, or differ by frequency."""
    train_length = 2 * window
    return [
        Method(f"SelfExtend {window}, reach ¾", f"selfextend:window={window},reach=0.75,train_length={train_length}"),
        Method(
            f"Leaky ReRoPE {window}, reach ¾", f"leakyrerope:window={window},reach=0.75,train_length={train_length}"
        ),
        Method(f"Jet-Long {window}", f"jetlong:window={window},train_length={train_length}"),
        Method(f"LaMPE {window // 4}", f"lampe:window={window // 4},train_length={train_length}"),
        Method(f"DPE {window}", f"dpe:window={window},scales=(1,8)"),
    ]


def chunked(window: int) -> list[Method]:
    """Dual Chunk Attention with chunks of 3/2 windows, and STRING."""
    return [
        Method(f"Dual Chunk {window * 3 // 2}", f"dualchunk:chunk={window * 3 // 2}"),
        Method(f"STRING {window}", f"string:shift={window}"),
    ]


def with_far_law(method: Method, train_length: int) -> Method:
    """A two-branch method with a share law and a temperature of far keys."""
    law = f"logn:train_length={train_length},keys=far+share:beta=0.75"
    return Method(f"{method.name} + share + far LogN", f"{method.recipe}+{law}", method.window, method.sinks)


def with_sinks_spared(method: Method, train_length: int) -> Method:
    """A two-branch method with a share law that counts the first four keys as near ones."""
    law = f"share:beta=1,reference={train_length // 2},sinks=4"
    return Method(f"{method.name} + share, 4 sinks", f"{method.recipe}+{law}")


def windowed(window: int) -> list[Method]:
    lambda_ = f"rerope:window={window}+lambda:sinks=5,window={window}"
    return [
        Method(f"window {window}", f"rope+window:size={window}", window),
        Method(f"StreamingLLM 4 + {window}", f"rope+sink:sinks=4,size={window}", window, 4),
        Method(f"LM-Infinite 5 + {window}", lambda_, window, 5),
    ]


def million(size: Sizes) -> Method:
    window = size.windows[0]
    recipe = f"rope+infoscale:train_length={size.train_length}+window:size={window}"
    return Method(f"window {window} + InfoScale", recipe, window)


ALIBI = Method("ALiBi", "alibi")
