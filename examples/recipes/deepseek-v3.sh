# DeepSeek-V3 (671B) with DeepSeek-V3.2's GRPO and R3: 512 trainer GPUs of 80 GB, servers of 32 GPUs. MODEL is the published FP8
# checkpoint; its multi-token-prediction layer is left out. The reference policy stays on the host.
#   experts  61 layers / PP 8 (7, 6 x 8, 6) x 256 experts / EP 32: 2.8 B parameters a GPU, their optimizer states over 2 copies
#   dense    17 B / PP 8 / TP 4, but latent attention's down-projections whole on every rank; their states over CP 2 x DP 8
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
GPUS=512 SERVER_GPUS=32          # 1.3 TB of bfloat16 weights
SERVER_ARGS+=" $PLAIN_WEIGHTS"
RECIPE+=(
  --algorithm deepseek_v32
  --rollout-batch-size 256 --n-samples-per-prompt 8 --rollout-max-prompt-len 2048 --rollout-max-response-len 14336 --num-steps-per-rollout 4
  --tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2
  --pipeline-model-parallel-size 8 --decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 6
  --expert-model-parallel-size 32 --expert-tensor-parallel-size 1 --moe-router-bias-update-rate 0
  --seq-length 16384 --max-tokens-per-gpu 8192
)
