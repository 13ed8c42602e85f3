#!/bin/bash
# What a recipe resolves to, and what its GPUs will hold; needs no GPU and no weights:   dry_run.sh qwen3-30b-a3b [further flags]
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
[ -r "$here/${1:-}.sh" ] && [ -d "$here/${1:-}" ] || { echo "recipes: $(cd "$here" && echo */ | tr -d /)" >&2; exit 2; }
source "$here/$1.sh"
export WORLD_SIZE=${WORLD_SIZE:-$GPUS}
venv=$(cd -P "$here/../.." && pwd)/.venv/bin/python
[ -x "$venv" ] || venv=python
exec "${PYTHON:-$venv}" -m megatron_grpo.train --dry-run --hf-checkpoint "${MODEL:-$here/$1}" --save runs/plan "${RECIPE[@]}" "${@:2}"
