"""What `isentrope evaluate` estimates before it starts, beside what passes take: CPU seconds and peaks of memory.

    python benchmarks/estimate.py --model FOLDER --lengths 1024,4096 --out benchmarks/results/estimate.json

Linux only, which resets a process's peak of memory. Results of other models in the file are kept. Times are of the
processor, not of the clock, so that other programs on the machine count less.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

from isentrope.evaluation.cost import estimate_cost
from isentrope.evaluation.evaluate import usual_recipes
from isentrope.evaluation.loading import load_on_device
from isentrope.evaluation.perplexity import PerplexityConfig, token_losses
from isentrope.evaluation.recipe_texts import PLAIN, under_recipe
from isentrope.evaluation.texts import Text
from isentrope.hf.layer_plan import read_train_length
from isentrope.utils.provenance import collect_provenance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gguf-file")
    parser.add_argument("--lengths", default="1024")
    parser.add_argument(
        "--recipes", default="two", choices=["two", "all"], help="plain and one more, or all usual ones"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model = load_on_device(options.model, gguf_file=options.gguf_file).eval()
    trained = read_train_length(model.config)
    name = Path(options.gguf_file or options.model).stem
    rows = []
    for length in map(int, options.lengths.split(",")):
        usual = usual_recipes(trained, max(length, 2 * trained))
        wanted = (PLAIN, *usual) if options.recipes == "all" else (PLAIN, next(x for x in usual if "+share" in x))
        tokens = torch.randint(10, model.config.vocab_size - 10, (length,), generator=torch.Generator().manual_seed(0))
        text = Text("random", "", tuple(tokens.tolist()))
        for recipe in wanted:
            with TemporaryDirectory() as folder, patch.object(time, "perf_counter", time.process_time):
                config = PerplexityConfig((recipe,), (0, length))
                estimate = estimate_cost(model, [text], config, None, Path(folder))
            row = {"model": name, "tokens": length, "recipe": recipe} | measure_pass(model, tokens, recipe)
            row |= {"estimated_seconds": estimate.seconds, "estimated_bytes": estimate.peak_bytes}
            rows.append(row)
            print(json.dumps(row), flush=True)
    earlier = json.loads(options.out.read_text(encoding="utf-8"))["rows"] if options.out.exists() else []
    measured = {(row["model"], row["tokens"], row["recipe"]) for row in rows}
    kept = [row for row in earlier if (row["model"], row["tokens"], row["recipe"]) not in measured]
    run = collect_provenance()
    options.out.write_text(json.dumps({"run": run, "rows": kept + rows}, indent=1) + "\n", encoding="utf-8")


def measure_pass(model, tokens, recipe) -> dict[str, float]:
    """Return the seconds of one pass, and its peak of memory with the weights, without what Python itself takes."""
    weights = sum(x.numel() * x.element_size() for x in model.parameters())
    with under_recipe(model, recipe):
        token_losses(model, tokens[:256])
        Path("/proc/self/clear_refs").write_text("5")
        before, start = read_status("VmRSS"), time.process_time()
        token_losses(model, tokens)
        seconds = time.process_time() - start
    return {"seconds": seconds, "bytes": weights + read_status("VmHWM") - before}


def read_status(key: str) -> int:
    """Return a number of bytes from what the kernel says of this process."""
    return 1024 * int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


if __name__ == "__main__":
    main()
