"""Let a model continue a long text and answer a question about it, plain and extended.

    python docs/results/generation/generate.py --model FOLDER --gguf-file FILE --text sign-of-four.txt --length 12288 \
        --recipe plain --recipe rerope:window=4096+share --out docs/results/generation/smollm2.json

The prompt is the first LENGTH tokens of the text, with one sentence that holds a number put in at DEPTH. Each recipe
continues it twice: as a text, and after a question for the number. Sampling is seeded, the same for every recipe.
Results are added to OUT as they come, with the command, versions and a hash of the prompt.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import isentrope as ise
from isentrope.utils.files import write_atomically

NUMBER = "48213"
NEEDLE = f"\n\nThe pass key is {NUMBER}. Remember it. {NUMBER} is the pass key.\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.0}
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or name")
    parser.add_argument("--gguf-file")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--title", default="", help="what the text is")
    parser.add_argument("--length", type=int, required=True, help="tokens of the prompt")
    parser.add_argument("--depth", type=float, default=0.5, help="where the number stands, from 0 to 1")
    parser.add_argument("--tokens", type=int, default=60, help="new tokens of the continuation")
    parser.add_argument("--recipe", action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    files = {"gguf_file": options.gguf_file} if options.gguf_file else {}
    tokenizer = AutoTokenizer.from_pretrained(options.model, **files)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, **files).eval()
    prompt = build_prompt(tokenizer, options.text.read_text("utf-8"), options.length, options.depth)
    result: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "model": options.gguf_file or Path(options.model).name,
        "train_length": model.config.max_position_embeddings,
        "text": options.title or options.text.name,
        "prompt": {
            "tokens": prompt.shape[1],
            "sha256": hashlib.sha256(prompt.numpy().tobytes()).hexdigest(),
            "end": tokenizer.decode(prompt[0, -60:]),
        },
        "number": {"needle": NEEDLE.strip(), "question": QUESTION.strip(), "depth": options.depth, "answer": NUMBER},
        "sampling": SAMPLING | {"seed": SEED, "new_tokens": options.tokens},
        "versions": {
            "isentrope": ise.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": sys.version.split()[0],
        },
        "rows": [],
    }
    for recipe in options.recipe:
        result["rows"].append(generate(model, tokenizer, prompt, recipe, options.tokens))
        with write_atomically(options.out) as partial:
            partial.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(json.dumps(result["rows"][-1], ensure_ascii=False, indent=1), flush=True)


def build_prompt(tokenizer: Any, text: str, length: int, depth: float) -> torch.Tensor:
    """Return (1, length) token ids: the start of the text with the sentence in it."""
    needle = tokenizer(NEEDLE, add_special_tokens=False).input_ids
    ids = tokenizer(text, add_special_tokens=False).input_ids[: length - len(needle)]
    if len(ids) < length - len(needle):
        raise SystemExit(f"text: expected at least {length} tokens, it has {len(ids)}")
    at = int(depth * len(ids))
    return torch.tensor([[*ids[:at], *needle, *ids[at:]]])


def generate(model: Any, tokenizer: Any, prompt: torch.Tensor, recipe: str, tokens: int) -> dict[str, Any]:
    """Read the prompt once, then continue it as a text and after the question."""
    if recipe != "plain":
        ise.extend(model, recipe)
    start = time.perf_counter()
    with torch.inference_mode():
        cache = model(prompt[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
        seconds = time.perf_counter() - start
        text = continue_from(model, tokenizer, prompt, copy.deepcopy(cache), tokens, SAMPLING)
        question = torch.tensor([tokenizer(QUESTION, add_special_tokens=False).input_ids])
        answer = continue_from(model, tokenizer, torch.cat([prompt, question], 1), cache, 8, {"do_sample": False})
    row = {"recipe": recipe, "continuation": text, "reply": answer, "found": NUMBER in answer}
    if recipe != "plain":
        row["description"] = str(ise.describe(model))
        ise.restore(model)
    return row | {"seconds": round(seconds, 1)}


def continue_from(model: Any, tokenizer: Any, ids: torch.Tensor, cache: Any, tokens: int, sampling: Any) -> str:
    torch.manual_seed(SEED)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=tokens,
        pad_token_id=0,
        eos_token_id=None,
        **sampling,
    )
    return str(tokenizer.decode(out[0, ids.shape[1] :]))


if __name__ == "__main__":
    main()
