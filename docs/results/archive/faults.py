"""ReRoPE and PI with faults that published implementations have had, beside both as they are meant.

    python docs/results/archive/faults.py MODEL CORPUS [--positions 128] [--out faults.json]

multiplied: positions times PI's factor, in place of divided by it.
unturned: far keys meet the query at distance +w whether they lie before it or after it.
unpermuted: where rotating also sorts a vector's entries (pairs interleaved, then concatenated, as in GAU-α), far
queries are rotated and sorted, and far keys, which need no rotation, are not sorted.
"""

from __future__ import annotations

import argparse
from dataclasses import astuple, replace
from pathlib import Path

import torch
from transformers import AutoTokenizer

from isentrope.core import call
from isentrope.data.prepared import PreparedCorpus
from isentrope.evaluation.masked_lm import MaskingProtocol, score_documents, summarize_scores
from isentrope.models import GAUAlphaForMaskedLM
from isentrope.positions import PI, ReRoPE
from isentrope.pretrained import resolve_device
from isentrope.utils.files import write_json
from isentrope.utils.provenance import collect_provenance

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
fold = call.fold


class Multiplied(PI):
    def frequencies(self, head_dim, length, dtype, device):
        return super().frequencies(head_dim, length, dtype, device) * self.factor**2


class Unturned(ReRoPE):
    def far(self, query, key, sign):
        return super().far(query, key, 1)


def unpermuted(x, turn=None, *others):
    """As `fold`, with what one angle for all has turned sorted: even entries, then odd ones."""
    y = fold(x, turn, *others)
    if turn is None or turn[0].shape[:-1].numel() > 1:
        return y
    return torch.cat((y[..., 0::2], y[..., 1::2]), -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--positions", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("faults.json"))
    options = parser.parse_args()
    prepared = PreparedCorpus.open(options.corpus)
    hashes = [row["sha256"] for row in prepared.manifest["documents"] if row["set"] == "test"]
    mask = AutoTokenizer.from_pretrained(prepared.tokenizer_path).mask_token_id
    device, dtype = resolve_device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for name, text, position, folds in (
        ("ReRoPE", "rerope:window=64", ReRoPE, fold), ("ReRoPE unturned", "rerope:window=64", Unturned, fold),
        ("ReRoPE unpermuted", "rerope:window=64", ReRoPE, unpermuted),
        ("ReRoPE with both", "rerope:window=64", Unturned, unpermuted),
        ("PI", "pi:factor=4", PI, fold), ("PI multiplied", "pi:factor=4", Multiplied, fold),
    ):  # fmt: skip
        for law in ("", "+infoscale:count=sequence"):
            model = GAUAlphaForMaskedLM.from_pretrained(options.model, recipe=text + law, dtype=dtype)
            for layer in model.gau_alpha.encoder.layer:
                meant = layer.gau.recipe
                part = position(*astuple(meant.position)[-1:], layout=meant.position.layout)
                layer.gau.recipe = replace(meant, position=part)
            model.to(device).eval()
            call.fold = folds
            for length in LENGTHS:
                protocol = MaskingProtocol(positions=options.positions)
                scores = score_documents(model, prepared.documents("test"), hashes, length, mask, protocol)
                rows.append({"what": name, "law": law.strip("+"), "length": length} | summarize_scores(scores))
                write_json(options.out, {"rows": rows, "run": collect_provenance()})
                print(f"{name:18s} {law:26s} {length:5d} {rows[-1]['ppl']:8.2f} {rows[-1]['acc']:.3f}", flush=True)


if __name__ == "__main__":
    main()
