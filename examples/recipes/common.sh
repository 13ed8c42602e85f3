# What every recipe shares; a recipe sources this file and appends its own flags to RECIPE. Later flags win.
# PROMPTS: JSON lines with the columns prompt and label, such as dapo-math-17k.jsonl; a dry run goes without
SERVER_ARGS=${SERVER_ARGS:---enable-return-routed-experts --mem-fraction-static 0.8}
# Of servers whose MODEL is in FP8: they keep plain weights, random ones until the trainer publishes its own.
PLAIN_WEIGHTS='--load-format dummy --json-model-override-args {"quantization_config":null}'
export CUDA_DEVICE_MAX_CONNECTIONS=1            # Megatron asks for it before Blackwell
RECIPE=(
  ${PROMPTS:+--prompt-data "$PROMPTS"} --input-key prompt --label-key label --apply-chat-template --rollout-shuffle --rm-type math
  --train-iters 500 --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 --clip-grad 1.0
  --save-interval 20 --keep-checkpoints 3 --eval-interval 20
  --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
  --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
  --use-dynamic-batch-size --weight-sync distributed
  --use-rollout-routing-replay                  # R3: the engine's experts, in every pass that the loss compares
)
