"""The contract matrix: every recipe part with every other, in every setting, and what is left out, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import isentrope as ise
from isentrope.dispatch import BACKENDS

# backends that are not compared with the reference on a CPU, gradients included, and why; all others are
NOT_ON_CPU = {
    "reference": "is what others are compared with",
    "flex": "has no backward on a CPU: compared without gradients in test_matrix.py, with them in test_precision.py",
    "decode": "needs Triton and a GPU: compared in test_fast.py",
    "band": "needs Triton and a GPU: compared in test_fast.py",
    "blocks": "is for recipes with retrieve: compared in test_retrieve.py",
}
CPU_BACKENDS = tuple(name for name in BACKENDS if name not in NOT_ON_CPU)

WINDOW = 8

POSITIONS = (
    "",
    "nope",
    "alibi",
    "rope",
    "rope:layout=interleaved",
    "rope:rotary_dim=8",
    "pi:factor=4",
    "ntk:factor=4",
    "ntk:factor=2,dynamic=True,original_length=20",
    "yarn:factor=16,original_length=32",
    "clex:dim={d},train_length=16",
    f"rerope:window={WINDOW}",
    f"rerope:window={WINDOW},layout=interleaved",
    f"leakyrerope:window={WINDOW},leak=4",
    f"selfextend:window={WINDOW},group=4",
    "dualchunk:chunk=12,local=3",
    f"string:shift={WINDOW},local=3",
    f"leakyrerope:window={WINDOW},reach=0.75,train_length=16",
    f"selfextend:window={WINDOW},train_length=16",
    f"jetlong:window={WINDOW},train_length=16",
    f"lampe:window={WINDOW},train_length=24,reach=0.5,tail=0",
    f"lampe:window={WINDOW},train_length=24,reach=0.5,tail=4,length=60",
    f"dpe:window={WINDOW},scales=(1,4,2)",
    "longrope:factors={factors},original_length=20",
    "cope:clip=3",
    "resonance:factor=4,original_length=32",
)
TEMPERATURES = (
    "",
    "constant",
    "loglength",
    "softmaxplus:base=16",
    "logn:train_length=16",
    "power:train_length=16",
    "yarntemperature:train_length=16",
    "yarntemperature:factor=16",
    "infoscale:train_length=16",
    "infoscale:train_length=16,epsilon=0.5,clamp=False,count=sequence",
    "infoscaleexact:train_length=16",
    "llama4:floor=16",
    "ssmax:heads={heads},bias=True",
    "fitted:lengths=(16,64),table=(1.0,1.5),count=position",
    "adaptive",
    "scaleinvariant:distance=3",
)
# for the methods with near and far keys; {table} has a number for each head, {factors} above one for each pair
FAR_POSITIONS = tuple(text for text in POSITIONS if any(key in text for key in ("window=", "chunk=", "shift=")))
SHARES = ("share:reference=8", "share:beta=1.5,reference=1", "share:beta={table},reference=12")
FAR_LAWS = (
    *SHARES,
    "logn:train_length=16,keys=far",
    "infoscale:train_length=16,keys=near",
    "power:train_length=16,gamma={table},keys=far+share:beta={table}",
    "logn:train_length=8,keys=near+power:train_length=12,gamma=-0.4,keys=far,count=position",
    "ssmax:heads={heads},bias=True,keys=far+infoscale:train_length=16,keys=near+share:beta=-0.5",
    "adaptive+share:beta=0.7,reference=2",
    "share:beta=0.8,reference=2,sinks=3",
    "logn:train_length=16,keys=far+share:beta={table},reference=3,sinks=4,count=visible",
    "adaptive:coefficients=(0.4,1),threshold=0.2,keys=far+logn:train_length=8,keys=near",
    "adaptive:keys=near+scaleinvariant:keys=far+share:beta={table},reference=4",
)
# far keys by choice, for causal attention with those methods
RETRIEVES = (
    "retrieve:blocks=2,size=4,sinks=4,queries=4",
    "retrieve:blocks=3,size=5,sinks=2,queries=7,score=votes,votes=2",
    "retrieve:blocks=1,size=3,sinks=0,queries=1,heads=all",
)
MASKS = (
    "",
    "causal",
    "window:size=9",
    "sink:sinks=3,size=9",
    f"lambda:sinks=5,window={WINDOW}",
    "(window:size=9|sink:sinks=2,size=3)&lambda:sinks=1,window=30",
)
SCORES = ("", "cosine:alpha=16")
CAUSAL = (False, True)


@dataclass(frozen=True)
class Setting:
    """Sizes of one call, and its rows: "", "lengths", "left", "documents", "position_ids" or "no_keys"."""

    queries: int
    keys: int
    rows: str = ""
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    d: int = 16
    dv: int = 16

    def tensors(self, dtype, device="cpu", seed=0):
        generator = torch.Generator().manual_seed(seed)
        shapes = (
            (self.batch, self.heads, self.queries, self.d),
            (self.batch, self.kv_heads, self.keys, self.d),
            (self.batch, self.kv_heads, self.keys, self.dv),
        )
        return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).to(device) for s in shapes]

    def arguments(self, device="cpu"):
        short = torch.tensor([self.keys, max(1, self.keys * 2 // 3)][: self.batch], device=device)
        match self.rows:
            case "lengths":
                return {"lengths": short}
            case "no_keys":
                return {"lengths": torch.tensor([self.keys, 0][: self.batch], device=device)}
            case "left":
                return {"mask": ise.Padding(short, side="left")}
            case "documents":
                return {"mask": ise.Document(torch.arange(self.keys, device=device) // max(2, self.keys // 3))}
            case "position_ids":
                generator = torch.Generator().manual_seed(1)
                return {"position_ids": ise.PoSE(4 * self.keys).sample(self.batch, self.keys, generator).to(device)}
        return {}


# awkward sizes on purpose: not multiples of anything a kernel likes
SETTINGS = (
    Setting(63, 63),
    Setting(100, 100, batch=1, heads=6, kv_heads=6, dv=24),
    Setting(63, 63, "lengths"),
    Setting(1, 63, heads=4, kv_heads=1),
    Setting(7, 100, "lengths", dv=8),
    Setting(63, 63, "documents", heads=2, kv_heads=2),
    Setting(50, 50, "left"),
    Setting(63, 63, "position_ids", d=8, dv=40),
    Setting(33, 33, "no_keys"),
    Setting(1, 1, batch=1, heads=1, kv_heads=1),
    Setting(40, 17, heads=3, kv_heads=3),
)


def meaningless(position: str, temperature: str, mask: str, score: str, causal: bool) -> str | None:
    """Why a combination is not in the matrix."""
    if causal and mask == "causal":
        return "causal twice is causal"
    return None


def takes(backend: str, recipe: ise.Recipe) -> bool:
    """Return whether a backend computes a recipe; SDPA multiplies scores by no factor of the distance."""
    return backend != "sdpa" or not any(isinstance(law, ise.ScaleInvariant) for law in recipe.temperatures)


def build(position: str, temperature: str, mask: str, score: str, setting: Setting) -> ise.Recipe:
    """Build a recipe; `temperature` may hold a share law too."""
    text = "+".join(part for part in (position, temperature, score, mask) if part) or "plain"
    table = tuple(0.25 * (head % 4 + 1) * (-1) ** (head // 2) for head in range(setting.heads))
    factors = tuple(1 + 0.5 * pair for pair in range(setting.d // 2))
    recipe = ise.Recipe.parse(text.format(d=setting.d, heads=setting.heads, table=table, factors=factors))
    for part in recipe.learned:
        part.eval()
        with torch.no_grad():  # not at their starting point, where they might coincide with something simpler
            for i, weight in enumerate(part.parameters()):
                noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
                weight.add_(0.05 * noise.to(weight))
    return recipe


NAMES = ("out", "lse", "entropy", "dq", "dk", "dv")
# fp64 arithmetic on a hundred tokens: a thousand roundings, times the size of the largest quantities
TOLERANCE = 1e-10


def run(recipe, setting, causal, backend, dtype=torch.float64, device="cpu", gradients=True):
    q, k, v = (x.requires_grad_(gradients) for x in setting.tensors(dtype, device))
    with torch.set_grad_enabled(gradients):
        out, aux = ise.attention(
            q, k, v, recipe, causal=causal, backend=backend, return_lse=True, return_entropy=True,
            **setting.arguments(device),
        )  # fmt: skip
    results = [out, aux.lse, aux.entropy]
    if gradients:
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        results += torch.autograd.grad((out * weight.to(out)).sum(), (q, k, v))
    return [x.detach() for x in results]


def difference(ours, reference):
    """Largest absolute difference; infinities must stand in the same places, and nothing may be NaN."""
    if not torch.equal(ours.isinf(), reference.isinf()) or ours.isnan().any() or ours.shape != reference.shape:
        return float("inf")
    finite = reference.isfinite()
    return (ours[finite].double() - reference[finite]).abs().max().item() if finite.any() else 0.0
