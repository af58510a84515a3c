#!/usr/bin/env bash
# Everything that docs/results/README.md has and lacks, in order of worth. What is done is kept: run again, it resumes.
#
#   bash docs/results/study.sh --data FOLDER --out FOLDER [--seconds 590] [--jobs 6] [--compile] [--seeds 3,4]
#                               [--novels FOLDER] [--books FOLDER] [--code FOLDER] [STEP…]
#
# FOLDERs of texts are those of `isentrope data prepare … --test 100`, of novels with --train-share 0.5 and of books with 0.35, which
# are few and long. A run stops after so many seconds, and is resumed by the same command: cells are files, trainings save their state
# every minute. Pre-trainings are the same for all plans of one --out alone, so that `tables` and `figures` belong in one --out on one
# machine. With --seeds, `tables` takes some of its pre-trainings; the others come in another --out, and `isentrope study join` joins
# each table's results. Figures are of pre-training 5. Commands with an --out each may run side by side: a pre-training takes 14 GiB of
# GPU memory, a training at 64 tokens 2, and cells of 4096 tokens up to 15 for a moment. --compile compiles short trainings too, which
# pays where several share what is compiled; NVIDIA's multi-process service lets small kernels of several processes overlap.
# Steps (study_costs.py has their seconds):
#
#   seeds     pre-trainings 5 to 7 of the study                                      QUICK=1: tiny models of two steps at one length,
#   repeat    one seed trained twice, and twice with --deterministic                 to see that it runs
#   tables    the paper's tables, CLEX, and one token masked at a time, from pre-trainings 3 to 7, the same for all
#   figures   f1 to f7 from the same models
#   why       what explains the difference from the paper
#   novels, books, code    other texts, four pre-trainings each
#   llamas    small Llamas: training length × head size × seeds
set -euo pipefail
here=$(dirname "$(realpath "$0")")
data='' out=results seconds=86400 jobs=6 novels='' books='' code='' seeds='' steps=() options=()
while [ $# -gt 0 ]; do
    case $1 in
        --compile) options=(--compile); shift; continue ;;
        --data) data=$2 ;; --out) out=$2 ;; --seconds) seconds=$2 ;; --jobs) jobs=$2 ;; --seeds) seeds=$2 ;;
        --novels) novels=$2 ;; --books) books=$2 ;; --code) code=$2 ;;
        -*) echo "study.sh: unknown option $1" >&2; exit 2 ;;
        *) steps+=("$1"); shift; continue ;;
    esac
    shift 2
done
all=(seeds repeat tables figures why novels books code llamas)
[ ${#steps[@]} -gt 0 ] || steps=("${all[@]}")
# results without a commit cannot be told apart later: a copy of the tree without its history must be given one
export ISENTROPE_COMMIT=${ISENTROPE_COMMIT:-$(git -C "$here" describe --always --dirty --abbrev=12 2>/dev/null || true)}
[ -n "$ISENTROPE_COMMIT" ] || { echo "study.sh: no commit is known here; set ISENTROPE_COMMIT to the commit of this tree" >&2; exit 2; }
end=$((SECONDS + seconds))
mkdir -p "$out"
done_file=$out/steps-done.txt
touch "$done_file"

within() {  # run a command until the time is up; 124 says that it was
    local left=$((end - SECONDS - 15))
    [ $left -gt 5 ] || return 124
    timeout --signal=INT --kill-after=30 "$left" "$@"
}

quick() {  # a plan whose models are tiny and have two steps of training, at one length
    [ -n "${QUICK:-}" ] || { echo "$1"; return; }
    python - "$1" "$out/$1.yaml" <<'EOF'
import sys
from pathlib import Path

import yaml

from isentrope.experiments.plan import load_plan

plan, small = load_plan(sys.argv[1]), {"steps": 2, "batch": 2, "layers": 1, "validation": 2}
sizes = {"hidden_size": 64, "intermediate_size": 128, "attention_key_size": 32}
rows = [{"method": r.method, "variant": r.variant, "checkpoint": r.checkpoint, "recipe": r.recipe} for r in plan.rows]
checkpoints = {}
for spec in plan.required_checkpoints():
    train = dict(spec.train) | small | ({} if "model" in spec.train else {"sizes": sizes})
    checkpoints[spec.name] = {"train": train, "seeded": spec.seeded}
claims = [claim | {"length": 128} for claim in plan.claims]
protocol = {"name": plan.protocol.name, "positions": 2}
data = {"title": plan.title, "lengths": [128], "seeds": [plan.seeds[0]], "entropy": False, "protocol": protocol}
data |= {"rows": rows, "checkpoints": checkpoints, "claims": claims}
Path(sys.argv[2]).write_text(yaml.safe_dump(data, allow_unicode=True))
EOF
    echo "$out/$1.yaml"
}

plan() {  # "PLAN…" CORPUS FOLDER [OPTION…]
    [ -n "$2" ] || { echo "  no corpus given: left out"; return 3; }
    local name names=() seeds=("${@:4}")
    for name in $1; do names+=("$(quick "$name")") || return; done
    [ -z "${QUICK:-}" ] || seeds=()
    within isentrope study run "${names[@]}" --data "$2" --out "$3" --jobs "$jobs" "${options[@]}" "${seeds[@]}"
}

repeat() {  # one configuration twice, plainly and with algorithms that give the same bits again
    local steps=200 every=10 more=()
    [ -z "${QUICK:-}" ] || { steps=2 every=1 more=(--batch 4 --layers 1 --length 32 --sizes hidden_size=32,intermediate_size=64,attention_key_size=32); }
    local mode name
    for mode in plain deterministic; do
        for name in 1 2; do
            local options=(--data "$data" --out "$out/repeat/$mode-$name" --preset pretrain --steps $steps --seed 0 --hash-every $every "${more[@]}")
            [ $mode = plain ] || options+=(--deterministic)
            within isentrope train "${options[@]}" || return
        done
        isentrope losses "$out/repeat/$mode-1" "$out/repeat/$mode-2" | tee "$out/repeat/$mode.txt"
    done
}

llamas() {  # heads of 32, 64 and 128; seeds and lengths side by side; the corpus is SymPy's sources
    local seed=0 length=0 status=0 running=()
    [ -e "$out/sympy/manifest.json" ] || within isentrope data prepare sympy --out "$out/sympy" --test 20 || return
    [ -e "$out/texts/modules.jsonl" ] || python "$here/share/modules.py" "$out/sympy" --out "$out/texts" || return
    for length in 256 128 512; do
        for seed in 0 1 2; do
            llamas_alike $length $seed &
            running+=($!)
        done
    done
    for seed in "${running[@]}"; do wait "$seed" || status=$?; done
    return $status
}

llamas_alike() {  # LENGTH SEED
    local size=0 steps=4000 more=() seconds=600
    [ -z "${QUICK:-}" ] || { steps=2 more=(--batch 2 --layers 1) seconds=5; }
    for size in 64 32 128; do
        local run=$out/llamas/n$1-d$size-s$2 results=$out/llamas/results-d$size-s$2
        [ -e "$results/small-llama-$1/leaderboard.json" ] && continue
        within isentrope train --data "$out/sympy" --out "$run" --preset causal --length "$1" --steps $steps --seed "$2" \
            --sizes "hidden_size=256,intermediate_size=512,num_attention_heads=$((256 / size))" "${options[@]}" "${more[@]}" || return
        within isentrope compare "$here/share/small-llama-$1.yaml" --model "$run/best" --data "$out/texts" \
            --out "$results" --seconds $seconds || return
    done
}

step() {
    local folder=$out
    case $1 in
        seeds) plan study "$data" "$folder" --seeds 5,6,7 ;;
        repeat) repeat ;;
        tables) plan "study-main study-ablation study-sweep study-softmax study-softmax-cosine study-clex study-anchor" "$data" "$folder" \
            ${seeds:+--seeds "$seeds"} ;;
        figures) [ -n "${QUICK:-}" ] || within isentrope study figures --data "$data" --out "$folder" --sweep study-sweep --main study-main --seed 5 ;;
        why) plan study-why "$data" "$folder" ;;
        novels) plan study-texts "$novels" "$folder/novels" ;;
        books) plan study-texts "$books" "$folder/books" ;;
        code) plan study-texts "$code" "$folder/code" ;;
        llamas) llamas ;;
        *) echo "study.sh: unknown step $1; expected ${all[*]}" >&2; exit 2 ;;
    esac
}

[ -n "$data" ] || [ "${steps[*]}" = llamas ] || { echo "study.sh: expected --data FOLDER" >&2; exit 2; }
failed=0
for name in "${steps[@]}"; do
    grep -qx "$name" "$done_file" && { echo "== $name: done before"; continue; }
    echo "== $name, $((end - SECONDS)) s left"
    start=$SECONDS status=0
    step "$name" || status=$?
    echo "== $name: status $status after $((SECONDS - start)) s" | tee -a "$out/steps.log"
    if [ $status -eq 0 ]; then
        echo "$name" >> "$done_file"
    elif [ $status -eq 3 ]; then
        continue
    elif [ $((end - SECONDS)) -le 25 ]; then
        echo "the time is up: run the same command again"
        exit 0
    else
        failed=1
    fi
done
exit $failed
