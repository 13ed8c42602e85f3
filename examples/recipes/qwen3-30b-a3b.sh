# Qwen3-30B-A3B with GSPO and R3: 16 trainer GPUs of 80 GB, servers of 2 GPUs.
#   experts  48 layers x 128 experts / EP 8: 3.6 B parameters a GPU, their optimizer states over 2 copies
#   dense    1.5 B / TP 4, their optimizer states over CP 2 x DP 2
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
GPUS=16 SERVER_GPUS=2
RECIPE+=(
  --algorithm gspo --use-tis
  --rollout-batch-size 128 --n-samples-per-prompt 8 --rollout-max-prompt-len 2048 --rollout-max-response-len 8192 --num-steps-per-rollout 4
  --tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
  --seq-length 10240 --max-tokens-per-gpu 8192
)
