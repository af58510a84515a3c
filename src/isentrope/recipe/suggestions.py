"""Suggestions for names of parts that recipes do not have: other spellings, papers' names and abbreviations."""

from __future__ import annotations

import re
from collections.abc import Iterable

from isentrope.utils.messages import suggest

# names that people use, in lower case without signs, and what to write
ALIASES = {
    "cosscale": "cosine:alpha=…",
    "cosinescale": "cosine:alpha=…",
    "leaky": "leakyrerope:window=…",
    "streaming": "sink:sinks=4,size=…",
    "streamingllm": "sink:sinks=4,size=…",
    "attentionsink": "sink:sinks=4,size=…",
    "attentionsinks": "sink:sinks=4,size=…",
    "sinks": "sink:sinks=4,size=…",
    "lminfinite": "rerope:window=…+lambda:sinks=4,window=…",
    "infinite": "rerope:window=…+lambda:sinks=4,window=…",
    "lambdamask": "lambda:sinks=4,window=…",
    "sliding": "window:size=…",
    "slidingwindow": "window:size=…",
    "swa": "window:size=…",
    "local": "window:size=…",
    "dca": "dualchunk",
    "chunkllama": "dualchunk",
    "dualchunkattention": "dualchunk",
    "dynamicntk": "ntk:factor=…,dynamic=True",
    "ntkaware": "ntk:factor=…",
    "linear": "pi:factor=…",
    "interpolation": "pi:factor=…",
    "positioninterpolation": "pi:factor=…",
    "groupedattention": "selfextend:window=…,group=…",
    "infllm": "rerope:window=…+retrieve",
    "reattention": "rerope:window=…+retrieve:score=votes",
    "sparse": "rerope:window=…+retrieve",
    "logscale": "logn",
    "lognscaling": "logn",
    "entropy": "infoscale",
    "rotary": "rope",
    "none": "plain",
    "default": "plain",
    "original": "plain",
    "vanilla": "plain",
    "dense": "full",
    "dynamic": "ntk:factor=…,dynamic=True",
    "auto": "auto:length=4x",
    "best": "auto:length=4x",
}
FACTOR_PARTS = ("pi", "ntk", "yarn")  # whose number, as in yarn4, is a factor


def suggest_part(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown part: what to write instead, or all that there is."""
    names = sorted(known)
    if not name:
        return "; each + stands between two parts"
    for written in (r"(\w+)\s+(\w+\s*=.+)", r"(\w+)\s*\((\w+\s*=.+)\)"):  # with a space, or as a call
        if (match := re.fullmatch(written, name)) and match[1].lower() in names:
            return f"; did you mean '{match[1].lower()}:{match[2]}'?"
    plain = re.sub(r"[^a-z0-9]", "", name.partition("(")[0].lower())
    if plain in names:
        return f"; did you mean {plain!r}?"
    if plain in ALIASES:
        return f"; did you mean {ALIASES[plain]!r}?"
    if (numbered := re.fullmatch(r"([a-z]+?)x?(\d+)x?", plain)) and numbered[1] in FACTOR_PARTS:
        return f"; did you mean '{numbered[1]}:factor={numbered[2]}'?"
    ending = suggest(plain or name, names)
    return ending if "did you mean" in ending else f"{ending}, and classes given to isentrope.recipe.register_part"
