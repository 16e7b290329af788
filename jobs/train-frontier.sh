#!/bin/bash
# Train on Frontier, then map an image.  sbatch jobs/train-frontier.sh
#
# About two minutes before the time limit the ranks are asked to stop: they write a checkpoint, and
# the job queues again, until training is done. When it is preempted the ranks are asked too, and
# Slurm queues it again. To stop it with a checkpoint and for good: scancel --signal=USR1 JOB; it
# then ends with 75. Submitted anew, it goes on from its last checkpoint.
#SBATCH --account=ABC123
#SBATCH --job-name=tilenet
#SBATCH --time=02:00:00
#SBATCH --nodes=2
#SBATCH --partition=batch
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
# CHANGE above: account, time, nodes.
set -euo pipefail

# CHANGE, here or in the environment of sbatch. RUN empty: only map. IMAGE empty: only train.
# PARTITIONS: GPUs per rank, which makes ranks fewer; empty: one GPU, partitions as in the run file.
RUN=${RUN-run.yaml}
IMAGE=${IMAGE-scene.tif}
OUTPUT=${OUTPUT:-out}
PARTITIONS=${PARTITIONS:-}

# Install once, on a login node, with these modules: torch for ROCm has its own index, mpi4py is
# built against Cray MPICH, and the rest comes from PyPI:
#   python -m venv venv; . venv/bin/activate
#   pip install torch --index-url https://download.pytorch.org/whl/rocm6.2
#   MPICC="cc -shared" pip install --no-cache-dir --no-binary=mpi4py mpi4py
#   pip install .
# CHANGE: versions (torch's ROCm and the module's are the same), and where venv stands.
module load PrgEnv-gnu rocm/6.2.4 craype-accel-amd-gfx90a cray-python
VENV=${VENV:-venv}
# shellcheck source=/dev/null
source "$VENV/bin/activate"
# On Frontier mpi4py is imported before torch.
TILENET=(python -c
    'import sys; from mpi4py import MPI; from tilenet.__main__ import main; sys.exit(main())')

# 8 GPUs (halves of MI250X) and 56 cores: 7 of the 64 for a GPU, 1 of each 8 for the system.
RANKS=$((8 / ${PARTITIONS:-1}))
CORES=$((7 * ${PARTITIONS:-1}))
export OMP_NUM_THREADS=$CORES
# RCCL on all four network cards; MIOpen's database where ranks do not wait for each other's locks.
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
MIOPEN_USER_DB_PATH=/tmp/$(id -un)/miopen
export MIOPEN_USER_DB_PATH MIOPEN_CUSTOM_CACHE_DIR=$MIOPEN_USER_DB_PATH
SPLIT=()
[ -z "$PARTITIONS" ] || SPLIT=(--partitions "$PARTITIONS")

# Every rank sees all GPUs of its node, in the order in which they stand next to the cores (cores
# 0-7 next to GPU 4, and so on), and takes its share of them.
export ROCR_VISIBLE_DEVICES=4,5,2,3,6,7,0,1
STEP=(--nodes="$SLURM_JOB_NUM_NODES" --ntasks="$((SLURM_JOB_NUM_NODES * RANKS))"
    --ntasks-per-node="$RANKS" --cpus-per-task="$CORES" --gpus-per-node=8 --gpu-bind=none
    --export=ALL --kill-on-bad-exit=1)

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
