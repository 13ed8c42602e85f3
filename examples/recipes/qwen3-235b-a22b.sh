# Qwen3-235B-A22B with GSPO and R3: 128 trainer GPUs of 80 GB, servers of 8 GPUs.
#   experts  94 layers / PP 4 (24, 24, 24, 22) x 128 experts / EP 16: 3.6 B parameters a GPU, their optimizer states over 2 copies
#   dense    7.8 B / PP 4 / TP 4, their optimizer states over CP 2 x DP 4
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
GPUS=128 SERVER_GPUS=8
RECIPE+=(
  --algorithm gspo --use-tis
  --rollout-batch-size 128 --n-samples-per-prompt 8 --rollout-max-prompt-len 2048 --rollout-max-response-len 16384 --num-steps-per-rollout 4
  --tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2
  --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 22
  --expert-model-parallel-size 16 --expert-tensor-parallel-size 1
  --seq-length 18432 --max-tokens-per-gpu 9216
)
