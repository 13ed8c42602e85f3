# GLM-4.5-Air (106B) with DAPO, truncated importance sampling and R3: 64 trainer GPUs of 80 GB, servers of 8 GPUs.
#   experts  45 MoE layers / PP 2 x 128 experts / EP 16: 3.2 B parameters a GPU, their optimizer states over 2 copies
#   dense    7 B / PP 2 / TP 4, their optimizer states over CP 2 x DP 4
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
GPUS=64 SERVER_GPUS=8
SERVER_ARGS+=" --disable-shared-experts-fusion"         # a fused shared expert would appear among the routes
RECIPE+=(
  --algorithm dapo --use-tis --overlong-buffer-len 4096
  --over-sampling-batch-size 192 --dynamic-sampling-filter-path megatron_grpo.rollout.filters.reward_nonzero_std
  --rollout-batch-size 128 --n-samples-per-prompt 8 --rollout-max-prompt-len 2048 --rollout-max-response-len 16384 --num-steps-per-rollout 4
  --rollout-stop-token-ids 151329 151336 151338
  --tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2 --pipeline-model-parallel-size 2
  --expert-model-parallel-size 16 --expert-tensor-parallel-size 1 --moe-router-bias-update-rate 0
  --seq-length 18432 --max-tokens-per-gpu 9216
)
