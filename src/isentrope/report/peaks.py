"""The paper's theorem 1 and figure 6: where cos θ peaks for each CosScale, measured and by Eq. 18, and two verdicts.

The theorem: "the peak value η* of the QK distribution before RoPE shifts toward 1 as CosScale α increases"; figure 6
compares it with Eq. 18 "for all CosScale values". Eq. 18 is the peak of e^{α cos θ} times the density of cos θ: that of
cosines weighted by the softmax before RoPE. Two claims, each with a rule:

    rises     that peak is more than STEP higher at the largest α than at the smallest, and never falls by more than
              STEP from one α to the next larger one
    agrees    that peak, or the one of all pairs weighted equally, is at most MARGIN away from Eq. 18 at every α
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from isentrope.report.verdicts import FAILS, HOLDS, NOT_MEASURED, Verdict
from isentrope.utils.files import RERUN_REMEDY, read_fields, write_json

STEP = 0.02  # two bins of the histogram
MARGIN = 0.05
RISES = "The peak of cos θ before RoPE shifts toward 1 as CosScale grows"
AGREES = "The peak of cos θ is where Eq. 18 says"


@dataclass(frozen=True)
class Peak:
    """Where cos θ of queries and keys peaks in one layer of a model.

    Args:
        alpha: CosScale.
        layer: which layer.
        head_dim: d.
        theory: η* of Eq. 18.
        pairs: the peak before RoPE, all pairs weighted equally.
        attended: the same, weighted by the softmax of the scores before RoPE.
        weights: hash of the model's weights.
    """

    alpha: float
    layer: int
    head_dim: int
    theory: float
    pairs: float
    attended: float
    weights: str | None = None


def read_peak(folder: Path) -> tuple[Peak, dict[str, Any]]:
    """Read the peak of one inspection, and with what it was measured.

    Args:
        folder: that `isentrope inspect` wrote, of a model with cosine scores.

    Raises:
        ValueError: the model has no cosine scores.
    """
    data = read_fields(folder / "inspect.json", RERUN_REMEDY, "theory", "angles", "layer", "run")
    if data["theory"] is None:
        raise ValueError(f"{folder}: expected a model with CosScale (cosine scores), got another")
    theory, before = data["theory"], data["angles"]["before"]
    numbers = before["pairs_peak"], before["attention_peak"]
    peak = Peak(theory["alpha"], data["layer"], theory["head_dim"], theory["peak_cosine"], *numbers, data["weights"])
    return peak, {key: data.get(key) for key in ("text", "lengths", "run")}


def write_peaks(folders: Sequence[Path], out: Path) -> Path:
    """Write the peaks of several inspections as one file.

    Args:
        folders: of inspections.
        out: the JSON file.

    Returns:
        `out`.
    """
    read = [read_peak(folder) for folder in folders]
    peaks = sorted((peak for peak, _ in read), key=lambda peak: (peak.layer, peak.alpha))
    source = read[0][1] if read else {}
    write_json(out, {"peaks": [asdict(peak) for peak in peaks], **source})
    return out


def load_peaks(path: Path) -> list[Peak]:
    """Load the peaks that `write_peaks` wrote."""
    return [Peak(**peak) for peak in read_fields(path, RERUN_REMEDY, "peaks")["peaks"]]


def decide_peaks(peaks: Sequence[Peak]) -> list[Verdict]:
    """Decide both claims, each over all layers.

    Args:
        peaks: of one model for each α, in one layer or more.

    Returns:
        A verdict for each claim: text, verdict, and the number that decides it as words.
    """
    layers = {peak.layer: [p for p in peaks if p.layer == peak.layer] for peak in peaks}
    ordered = [sorted(layer, key=lambda peak: peak.alpha) for layer in layers.values()]
    falls = [(a.attended - b.attended, a.alpha, b.alpha) for layer in ordered for a, b in pairwise(layer)]
    rise = min((layer[-1].attended - layer[0].attended for layer in ordered), default=0.0)
    errors = [(min(abs(x - peak.theory) for x in (peak.attended, peak.pairs)), peak.alpha) for peak in peaks]
    rises = {"text": RISES, "verdict": NOT_MEASURED, "words": "fewer than two α"}
    if falls:
        fall, first, second = max(falls)
        step = f"least step {round(-fall, 2) + 0:+.2f} from α = {first:g} to {second:g}"
        words = f"{round(rise, 2) + 0:+.2f} in all, {step}; more than {STEP:g} is a rise or a fall"
        rises |= {"verdict": HOLDS if fall <= STEP < rise else FAILS, "words": words}
    agrees = {"text": AGREES, "verdict": NOT_MEASURED, "words": "no α"}
    if errors:
        error, alpha = max(errors)
        words = f"largest distance {error:.2f}, at α = {alpha:g}; at most {MARGIN:g} agrees"
        agrees |= {"verdict": FAILS if error > MARGIN else HOLDS, "words": words}
    return [rises, agrees]
