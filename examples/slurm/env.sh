# Everything that train.sbatch and colocated.sbatch need to know about a site and a job: edit this file, or copy it and set
# GRPO_ENV to the copy. A variable that is set already, e.g. by  MODEL=... sbatch train.sbatch ...,  wins.

# ---- paths, the same on every node ---------------------------------------------------------------------------------------
: "${PYTHON:=python}"                 # of the environment that holds megatron_grpo and Megatron-Core
: "${SGLANG:=python -m sglang.launch_server}"         # how a rollout node starts a server; an environment of its own is fine
: "${MODEL:?set MODEL in env.sh: the Hugging Face directory to start from, its tokenizer included}"
: "${RUN:?set RUN in env.sh: the directory of checkpoints, metrics, report and logs, on a file system that all nodes share}"

# ---- nodes and GPUs ------------------------------------------------------------------------------------------------------
: "${TRAIN_NODES:=4}"                 # the first nodes of the allocation train, the others serve; a heterogeneous job ignores it
: "${GPUS_PER_NODE:=8}"
: "${TRAIN_GPUS:=$GPUS_PER_NODE}"     # trainer ranks of a trainer node; in colocated.sbatch the other GPUs serve
: "${SERVER_GPUS:=$GPUS_PER_NODE}"    # GPUs of one server: fewer than a node's make several servers on it, a multiple spans nodes
: "${SERVER_ARGS:=--enable-return-routed-experts}"    # of every server; the flag is what --use-rollout-routing-replay needs
: "${MASTER_PORT:=29500}"             # of the trainers' rendezvous, on the first node
: "${SERVER_PORT:=30000}"             # of the first server of a node; the next ones count up
# A router in front of the servers, e.g. ROUTER="python -m sglang_router.launch_router". Without one the trainer spreads its requests
# over the servers itself, and leaves out those that fail. sglang-router 0.3.2 drops the field that asks for routed experts: with
# --use-rollout-routing-replay leave ROUTER empty.
: "${ROUTER:=}" "${ROUTER_PORT:=29900}"

# ---- network -------------------------------------------------------------------------------------------------------------
address() { echo "$1"; }              # node name -> the address at which other nodes reach it, e.g. echo "$1-ib0"
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# module load cuda
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}    # Megatron overlaps tensor-parallel communication only with 1
