#!/bin/bash
# A private Slurm of N nodes on this one machine: real slurmctld, slurmd, munge, sbatch, srun, scancel and requeue. Needs root.
#   private_slurm.sh install            from Debian's packages, where it is missing
#   private_slurm.sh start DIR N        everything it writes is in DIR; then  export SLURM_CONF=DIR/slurm.conf
#   private_slurm.sh stop DIR
# Nothing of the machine's own is touched: munge has a key and a socket of its own, and every port is a free one.
set -euo pipefail

install() {
  command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null && command -v pkill >/dev/null && return
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge procps >/dev/null
}

free_ports() {
  python3 - "$1" <<'PY'
import socket, sys
sockets = [socket.socket() for _ in range(int(sys.argv[1]))]
for s in sockets:
    s.bind(("127.0.0.1", 0))
print(*(s.getsockname()[1] for s in sockets))
PY
}

configure() {
  local host ports cpus memory
  host=$(hostname -s) cpus=$(nproc) memory=$(($(awk '/MemTotal/ {print $2}' /proc/meminfo) / 1024))
  read -ra ports <<< "$(free_ports $((N + 1)))"
  cat <<CONF
ClusterName=private
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
AuthType=auth/munge
AuthInfo=socket=$D/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool.%n
SlurmctldPidFile=$D/slurmctld.pid
SlurmdPidFile=$D/slurmd.%n.pid
SlurmctldLogFile=$D/slurmctld.log
SlurmdLogFile=$D/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2
KillWait=10
MinJobAge=3600
ReturnToService=2
CONF
  for ((k = 1; k <= N; k++)); do
    echo "NodeName=n$k NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[k]} CPUs=$cpus RealMemory=$memory State=UNKNOWN"
  done
  echo "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
}

start() {
  mkdir -p "$D/state"
  chmod 755 "$D"
  configure > "$D/slurm.conf"
  export SLURM_CONF=$D/slurm.conf
  head -c 1024 /dev/urandom > "$D/munge.key"
  chmod 400 "$D/munge.key"
  munged --force --key-file="$D/munge.key" --socket="$D/munge.socket" --pid-file="$D/munged.pid" --log-file="$D/munged.log" \
    --seed-file="$D/munge.seed"
  slurmctld
  for ((k = 1; k <= N; k++)); do mkdir -p "$D/spool.n$k"; slurmd -N "n$k"; done
  for _ in $(seq 60); do
    [ "$(sinfo -h -N -o %T 2>/dev/null | grep -c idle)" = "$N" ] && return
    sleep 0.5
  done
  stop
  echo "the nodes did not come up; the ends of their logs:" >&2
  tail -n 5 "$D"/*.log >&2
  return 1
}

stop() {      # jobs first, then the daemons; whatever has not ended 10 seconds later is killed
  local file pid pids=()
  export SLURM_CONF=$D/slurm.conf
  timeout 10 scancel --user=root 2>/dev/null || true
  for _ in $(seq 40); do [ -z "$(timeout 10 squeue --noheader 2>/dev/null)" ] && break; sleep 0.5; done
  for file in "$D"/slurmd.*.pid "$D/slurmctld.pid" "$D/munged.pid"; do
    if [ -f "$file" ]; then pids+=("$(cat "$file")"); fi
  done
  for pid in $(pgrep -x slurmstepd); do
    if grep -qs "SLURM_CONF=$D/slurm.conf" "/proc/$pid/environ"; then pids+=("$pid"); fi
  done
  kill "${pids[@]}" 2>/dev/null || true
  for _ in $(seq 20); do kill -0 "${pids[@]}" 2>/dev/null || return 0; sleep 0.5; done
  kill -KILL "${pids[@]}" 2>/dev/null || true
}

command=${1:?install, start or stop}
if [ "$command" = install ]; then install; exit; fi
mkdir -p "${2:?directory}"
D=$(cd "$2" && pwd) N=${3:-2}
"$command"
