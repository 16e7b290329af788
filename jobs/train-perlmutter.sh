#!/bin/bash
# Train on Perlmutter, then map an image.  sbatch jobs/train-perlmutter.sh
#
# About two minutes before the time limit the ranks are asked to stop: they write a checkpoint, and
# the job queues again, until training is done. When it is preempted the ranks are asked too, and
# Slurm queues it again. To stop it with a checkpoint and for good: scancel --signal=USR1 JOB; it
# then ends with 75. Submitted anew, it goes on from its last checkpoint.
#SBATCH --account=m1234
#SBATCH --job-name=tilenet
#SBATCH --time=02:00:00
#SBATCH --nodes=2
#SBATCH --qos=regular
#SBATCH --constraint=gpu
#SBATCH --gpus-per-node=4
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
# CHANGE above: account, time, nodes; --constraint=gpu&hbm80g (in quotes) for 80 GB per GPU.
set -euo pipefail

# CHANGE, here or in the environment of sbatch. RUN empty: only map. IMAGE empty: only train.
# PARTITIONS: GPUs per rank, which makes ranks fewer; empty: one GPU, partitions as in the run file.
RUN=${RUN-run.yaml}
IMAGE=${IMAGE-scene.tif}
OUTPUT=${OUTPUT:-out}
PARTITIONS=${PARTITIONS:-}

# Install once, on a login node: the module brings torch, NCCL over the network, and mpi4py with
# Cray MPICH: module load pytorch; python -m venv --system-site-packages venv; . venv/bin/activate;
# pip install .    CHANGE: the module's version, and where venv stands.
module load pytorch
VENV=${VENV:-venv}
# shellcheck source=/dev/null
source "$VENV/bin/activate"
TILENET=(tilenet)

# 4 GPUs, 64 cores with two threads each: 32 of srun's "CPUs" for a GPU, a thread for every core.
RANKS=$((4 / ${PARTITIONS:-1}))
CORES=$((32 * ${PARTITIONS:-1}))
export OMP_NUM_THREADS=$((CORES / 2)) OMP_PLACES=cores OMP_PROC_BIND=spread
# Gradients go over NCCL; MPI only where mpi4py is linked with Cray's GPU library may have a 1.
export MPICH_GPU_SUPPORT_ENABLED=${MPICH_GPU_SUPPORT_ENABLED:-0}
SPLIT=()
[ -z "$PARTITIONS" ] || SPLIT=(--partitions "$PARTITIONS")

# Every rank sees all GPUs of its node and takes its share of them: with a GPU per task each would
# be alone in a cgroup, and the GPUs could not talk to each other.
STEP=(--nodes="$SLURM_JOB_NUM_NODES" --ntasks="$((SLURM_JOB_NUM_NODES * RANKS))"
    --ntasks-per-node="$RANKS" --cpus-per-task="$CORES" --gpus-per-node=4 --gpu-bind=none
    --mpi=cray_shasta --kill-on-bad-exit=1)

# srun's exit code says nothing when a step was killed, so rank 0 leaves its own in a file. A rank
# that stopped with a checkpoint (75) ends with 0, or srun would kill those that are still ending.
# Signals come to the shells around the ranks too; these wait.
export STATUS=$PWD/tilenet-$SLURM_JOB_ID.status
# shellcheck disable=SC2016 # expands on the ranks
RANK='trap : USR1 TERM
"$@"; code=$?
[ "$SLURM_PROCID" != 0 ] || echo "$code" >"$STATUS"
[ "$code" != 75 ] || code=0
exit "$code"'

ASKED=''
trap 'ASKED=yes; scancel --signal=USR1 "$SLURM_JOB_ID" || true' USR1 # to the ranks

# Run a program on all ranks; CODE becomes its exit code.
step() {
    rm -f "$STATUS"
    srun "${STEP[@]}" bash -c "$RANK" rank "$@" &
    local launcher=$!
    while :; do # a trap runs when wait returns, and then the step still goes on
        wait "$launcher" || true
        kill -0 "$launcher" 2>/dev/null || break
    done
    CODE=$(cat "$STATUS" 2>/dev/null || echo 1)
    rm -f "$STATUS"
}

# The next job would do the same again, so only after a stop with a checkpoint.
if [ -n "$RUN" ]; then
    step "${TILENET[@]}" train -c "$RUN" --output "$OUTPUT" "${SPLIT[@]}" --resume
    if [ "$CODE" = 75 ] && [ -n "$ASKED" ]; then
        echo "out of time, with a checkpoint: queued again"
        scontrol requeue "$SLURM_JOB_ID"
        exit 0
    fi
    [ "$CODE" = 0 ] || exit "$CODE"
fi
# A map begins anew: a job that has too little time for it asks for more.
if [ -n "$IMAGE" ]; then
    step "${TILENET[@]}" predict "$OUTPUT" "$IMAGE" "$OUTPUT/map.tif" "${SPLIT[@]}" --overwrite
    [ "$CODE" = 0 ] || exit "$CODE"
fi
