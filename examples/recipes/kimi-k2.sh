# Kimi-K2 (1T) with GSPO and R3: 512 trainer GPUs of 80 GB, servers of 64 GPUs. MODEL is the published FP8 checkpoint.
#   experts  60 MoE layers / PP 16 (3, 14 x 4, 2) x 384 experts / EP 32: 2.1 B parameters a GPU, their optimizer states on one copy
#   dense    11.7 B / PP 16 / TP 4, but latent attention's down-projections whole on every rank; their states over CP 2 x DP 4
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
GPUS=512 SERVER_GPUS=64          # 2.1 TB of bfloat16 weights
SERVER_ARGS+=" $PLAIN_WEIGHTS --trust-remote-code"
RECIPE+=(
  --trust-remote-code                           # the tokenizer is Python code in the checkpoint's directory, and needs tiktoken
  --algorithm gspo --use-tis
  --rollout-batch-size 256 --n-samples-per-prompt 8 --rollout-max-prompt-len 2048 --rollout-max-response-len 14336 --num-steps-per-rollout 4
  --tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2
  --pipeline-model-parallel-size 16 --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2
  --expert-model-parallel-size 32 --expert-tensor-parallel-size 1 --moe-router-bias-update-rate 0
  --seq-length 16384 --max-tokens-per-gpu 8192
)
