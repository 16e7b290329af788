#!/bin/bash
# Train, then map, on perlmutter: 2 nodes, 2 ranks (1 a node), each with 4 devices and 64 cores.
# Written by `python -m launch`.  Submit: sbatch perlmutter.sh
#SBATCH --job-name=tilenet
#SBATCH --time=120
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=128
#SBATCH --gpus-per-node=4
#SBATCH --account=m1234_g
#SBATCH --qos=regular
#SBATCH --constraint=gpu
#SBATCH --exclusive
#SBATCH --output=tilenet.%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@600
# append: a requeued job goes on with its log. signal: USR1 comes to this shell so many seconds before
# the limit, or up to a minute earlier.
set -euo pipefail

forward() { # to the ranks of all steps, not to this shell
    scancel --signal=USR1 "$SLURM_JOB_ID" || true
}

run_again() {
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}

# --- what to run, and on what: CHANGE
RUN=run.yaml
PLAN=plan.json
IMAGE=scene.tif
OUTPUT=out
# Files and folders, by relative paths, that are copied to each node's own storage first; the paths
# in the run file then lead to the copies. Name all that it names, and IMAGE; empty: nothing is copied.
STAGE=()
STORAGE=/tmp

# --- the machine: perlmutter
module load pytorch
export OMP_NUM_THREADS=64
export MPICH_GPU_SUPPORT_ENABLED=1

# 2 nodes, 2 ranks (1 a node), each with 4 devices and 64 cores
LAUNCH=(
    srun
    -N 2
    -n 2
    --ntasks-per-node=1
    -c 128
    --gpus-per-node=4
    --gpu-bind=none
    --mpi=cray_shasta
    --kill-on-bad-exit=1
)
ONCE_PER_NODE=(
    srun
    -N 2
    -n 2
    --ntasks-per-node=1
    -c 1
    --mpi=none
    --kill-on-bad-exit=1
)

# --- how
RUN=$(realpath "$RUN")
PLAN=$(realpath "$PLAN")
mkdir -p "$OUTPUT"
OUTPUT=$(realpath "$OUTPUT")
export STATUS=$OUTPUT/status WORK=$PWD
LAUNCHER='' RESULT='' ASKED='' ENDED=''
trap 'ASKED=yes; forward' USR1
trap 'ENDED=yes; forward' TERM # somebody cancels the job: stop, and do not come back

# What a rank runs. It writes how the program ended into the status file, where the launcher's exit
# code does not tell a stop from a crash (a step that is killed always says 137 or 143). A stop with
# a checkpoint (75) is no reason to kill the other ranks: the rank then ends with 0.
# shellcheck disable=SC2016 # expands on the ranks
RANK='
asked= code=0
# Signals come to all processes of a rank; bash looks at them when the program has ended.
trap "asked=yes" USR1
trap : TERM
cd "$WORK" || exit 1
"$@" || code=$?
rank=${PMIX_RANK:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${SLURM_PROCID:-0}}}}
wrote=$code
# asked to stop before it listened, or where it does not: nothing is lost
if [ -n "$asked" ] && [ "$code" = 138 ]; then wrote=75; fi
if [ "$rank" = 0 ] || { [ "$code" != 0 ] && [ "$code" != 75 ]; }; then
    echo "$wrote" >>"$STATUS"
fi
[ "$code" = 75 ] && exit 0
exit "$code"
'

# Run a program on all ranks; RESULT is finished, stopped or failed.
step() {
    : >"$STATUS"
    "${LAUNCH[@]}" bash -c "$RANK" rank "$@" &
    LAUNCHER=$!
    while :; do
        # a trap runs only when wait returns, and then the step still goes on
        wait "$LAUNCHER" || true
        kill -0 "$LAUNCHER" 2>/dev/null || break
    done
    LAUNCHER=''
    if [ ! -s "$STATUS" ] || grep -qvx -e 0 -e 75 "$STATUS"; then
        RESULT=failed
    elif grep -qx 75 "$STATUS"; then
        RESULT=stopped
    else
        RESULT=finished
    fi
    echo "$2: $RESULT"
}

if [ ${#STAGE[@]} -gt 0 ]; then
    WORK=$STORAGE/${USER:-$(id -un)}/tilenet
    # shellcheck disable=SC2016 # expands on the nodes
    "${ONCE_PER_NODE[@]}" bash -c 'mkdir -p "$WORK" && cp -r --parents "$@" "$WORK"' copy "${STAGE[@]}"
fi

# Only for a job that was asked to make room, or ran out of time.
stopped() {
    if [ -n "$ENDED" ]; then exit 143; fi
    run_again
}

step tilenet train -c "$RUN" --plan "$PLAN" --output "$OUTPUT" --resume
if [ "$RESULT" = failed ]; then exit 1; fi
if [ "$RESULT" = stopped ] || [ -n "$ASKED$ENDED" ]; then stopped; fi

step tilenet predict "$OUTPUT" "$IMAGE" "$OUTPUT/map.tif" --plan "$PLAN" --overwrite
# A map begins anew each time: once is bad luck, twice means that the job's time is too short.
if [ "$RESULT" = stopped ] && [ ! -e "$OUTPUT/map.again" ]; then
    touch "$OUTPUT/map.again"
    stopped
fi
rm -f "$OUTPUT/map.again"
if [ "$RESULT" = stopped ]; then echo "the map needs more time than the job has"; fi
if [ "$RESULT" != finished ]; then exit 1; fi
