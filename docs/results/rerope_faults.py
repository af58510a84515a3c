"""ReRoPE with two faults that its published bidirectional implementations have had, beside ReRoPE as it is meant.

    python docs/results/rerope_faults.py MODEL CORPUS [--positions 128] [--out rerope_faults.json]

unturned: far keys meet the query at distance +w whether they lie before it or after it.
unpermuted: where rotating also sorts a vector's entries (pairs interleaved, then concatenated, as in GAU-α), far
queries are rotated and sorted, and far keys, which need no rotation, are not sorted.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer

from isentrope.data.prepared import Prepared
from isentrope.models import GAUAlphaForMaskedLM
from isentrope.positions import ReRoPE
from isentrope.study.checkpoint import write_json
from isentrope.study.evaluate import Protocol, evaluate, summary
from isentrope.study.place import place
from isentrope.study.provenance import provenance

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
attention = importlib.import_module("isentrope.attention")  # the module, not the function of that name
fold = attention.fold


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
    parser.add_argument("--out", type=Path, default=Path("rerope_faults.json"))
    options = parser.parse_args()
    prepared = Prepared.open(options.corpus)
    hashes = [row["sha256"] for row in prepared.manifest["documents"] if row["set"] == "test"]
    mask = AutoTokenizer.from_pretrained(prepared.tokenizer_path).mask_token_id
    device, dtype = place("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for name, position, folds in (
        ("as meant", ReRoPE, fold), ("unturned", Unturned, fold), ("unpermuted", ReRoPE, unpermuted),
        ("both faults", Unturned, unpermuted),
    ):  # fmt: skip
        for law in ("", "+infoscale:count=sequence"):
            model = GAUAlphaForMaskedLM.from_pretrained(options.model, recipe=f"rerope:window=64{law}", dtype=dtype)
            for layer in model.gau_alpha.encoder.layer:
                meant = layer.gau.recipe
                layer.gau.recipe = replace(meant, position=position(64, layout=meant.position.layout))
            model.to(device).eval()
            attention.fold = folds
            for length in LENGTHS:
                protocol = Protocol(positions=options.positions)
                scores = evaluate(model, prepared.documents("test"), hashes, length, mask, protocol)
                rows.append({"what": name, "law": law.strip("+"), "length": length} | summary(scores))
                print(f"{name:12s} {law:26s} {length:5d} {rows[-1]['ppl']:8.2f} {rows[-1]['acc']:.3f}", flush=True)
    write_json(options.out, {"rows": rows, "run": provenance()})


if __name__ == "__main__":
    main()
