#!/bin/bash
# Train, then map, on slurm: 1 node, 4 ranks (4 a node), each with 1 device and 16 cores.
# Written by `tilenet job`.  Submit: sbatch awkward.bash
#SBATCH --job-name=job.1
#SBATCH --time=120
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --output=job.1.%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@600
# CHANGE, here or as options of sbatch, which win: account, partition, time (below twice the seconds
# of --signal change these too). Nodes, tasks, cores and GPUs follow from the plan: for others, plan
# and write the script again. append: a requeued job goes on with its log. signal: USR1 comes to this
# shell so many seconds before the limit, or up to a minute earlier.
set -euo pipefail

# Whether others need the nodes: Slurm then tells the ranks, and not this shell.
preempted() {
    [[ $(scontrol show job -o "$SLURM_JOB_ID") == *' PreemptTime='[0-9]* ]]
}

# Queue again, but not where somebody stopped the ranks (scancel --signal=USR1), or cancels the job.
run_again() {
    if [ -z "$ASKED" ] && ! preempted; then exit 75; fi
    if [[ $(scontrol show job -o "$SLURM_JOB_ID") != *' JobState=RUNNING '* ]]; then exit 75; fi
    # The job's next life has the same number: nothing that is for this one may reach it. So Slurm
    # ends this script; an end of its own could be taken for that of the next life.
    trap '' USR1
    trap - TERM
    if scontrol requeue "$SLURM_JOB_ID"; then sleep 1000; fi
    exit 75
}

ASKED='' ENDED=''
trap 'ASKED=yes' USR1 # to make room: stop, and come back
trap 'ENDED=yes' TERM # somebody cancels the job: stop, and do not come back

# --- what to run, and on what: CHANGE, here or in the environment
RUN=${RUN-'it'"'"'s $(me).yaml'} # the run file; empty: only map
PLAN=${PLAN-'a;b}.json'}
IMAGE=${IMAGE-'-x`id`.tif'} # the raster to map; empty: only train
OUTPUT=${OUTPUT-'o u'"'"'t'} # the run's folder
PREDICT=${PREDICT-} # more options of tilenet predict: --output probabilities --tile 1024
# A virtual environment with tilenet; empty: tilenet is there without.
VENV=${VENV-'$v'}
# Files and folders, by relative paths, that are copied to each node's own storage first; the paths
# in the run file then lead to the copies. Name all that it names, and IMAGE; empty: nothing is copied.
STAGE=('$HOME' 'a b')
STORAGE=/tmp

# --- the machine: slurm
# Install once: python -m venv venv; venv/bin/pip install -c constraints.txt '.[mpich]'
# or with the site's MPI, which knows the network: in the environment
#     MPICC=mpicc pip install --no-binary=mpi4py mpi4py; pip install .
# srun's --mpi below belongs to mpi4py's MPI: pmi2 to mpich, pmix to Open MPI, cray_shasta to Cray
# MPICH; srun --mpi=list names what there is. With the wrong one each rank would be alone; tilenet
# notices, and says so. CHANGE it there if need be, or as launch.mpi of a machine of your own.
# Where srun says 'mpi/pmi2: invalid client request': export MPIR_CVAR_CH4_NETMOD=ofi below
# (docs/failures.md says why).
if [ -n "$VENV" ]; then
    # shellcheck source=/dev/null
    source "$VENV/bin/activate"
fi
export OMP_NUM_THREADS=16

# 1 node, 4 ranks (4 a node), each with 1 device and 16 cores
LAUNCH=(
    srun
    -N 1
    -n 4
    --ntasks-per-node=4
    -c 16
    --gpus-per-node=4
    --gpu-bind=none
    --mpi=pmi2
    --kill-on-bad-exit=1
    --wait=60
)
ONCE_PER_NODE=(
    srun
    -N 1
    -n 1
    --ntasks-per-node=1
    -c 1
    --mpi=none
    --kill-on-bad-exit=1
)
TILENET=(tilenet)

# --- how
mkdir -p "$OUTPUT"
OUTPUT=$(realpath "$OUTPUT")
PLAN=$(realpath "$PLAN")
WORK=$PWD LAUNCHER='' RESULT='' STARTED='' UNSTARTED=0

# What a rank runs. It writes how the program ended into the status file, where the launcher's exit
# code does not tell a stop from a crash (a step that is killed always says 137 or 143). A stop (75)
# is no reason to kill the other ranks: the rank then ends with 0.
# shellcheck disable=SC2016 # expands on the ranks
RANK='
status=$1 work=$2 early=$3
shift 3
rank=${PMIX_RANK:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${SLURM_PROCID:-0}}}}
cd "$work" || exit 1
export TILENET_STARTED=$status.mpi # which rank 0 makes when MPI is up
# A shell that ignores signals waits for the program: bash that catches one at the moment in which
# the program ends can lose its code. The program must not die of one that comes before it listens.
exec 3>&1 4< <(
    trap "" USR1 TERM
    if [ "$early" = ignore ]; then "$@" >&3 & else (trap - USR1 TERM && exec "$@") >&3 & fi
    echo "$!"
    wait "$!"
    echo "$?"
)
read -r program <&4
asked=
trap "asked=yes" USR1 TERM
# The launcher is up: only from now on can it be sent signals.
if [ "$rank" = 0 ]; then echo began >>"$status"; fi
code=
while :; do
    # A signal can come between two digits; 0: the line is complete, 1: the pipe is closed.
    read -r -t 1 part <&4
    got=$?
    code=$code$part
    [ "$got" -gt 1 ] || break
    # The launcher may have told this shell alone, and the program may not listen yet.
    if [ -n "$asked" ]; then kill -USR1 "$program" 2>/dev/null; fi
done
code=${code:-137}
if [ -n "$asked" ]; then
    case $code in 138 | 143) code=75 ;; esac # it does not listen: they ended it
fi
if [ "$rank" = 0 ] || { [ "$code" != 0 ] && [ "$code" != 75 ]; }; then
    echo "$code" >>"$status"
fi
[ "$code" = 75 ] && exit 0
exit "$code"
'

# Run a program on all ranks: step NAME ignore|take PROGRAM… (what it does with signals before it
# catches them). RESULT is finished, stopped, failed, or killed: none of the ranks could say. STARTED
# is empty where MPI never was up.
step() {
    local status
    status=$(mktemp "$OUTPUT/status.XXXXXX")
    "${LAUNCH[@]}" bash -c "$RANK" rank "$status" "$WORK" "${@:2}" &
    LAUNCHER=$!
    # Not with `wait`, which signals interrupt. The launcher hands signals on to its ranks.
    while kill -0 "$LAUNCHER" 2>/dev/null; do
        if [ -n "$ASKED$ENDED" ] && [ -s "$status" ]; then
            kill -USR1 "$LAUNCHER" 2>/dev/null || true
        fi
        sleep 0.5 || true # a signal to all processes of the job ends it
    done
    if grep -qvx -e began -e 0 -e 75 "$status"; then
        RESULT=failed
    elif grep -qx 75 "$status"; then
        RESULT=stopped
    elif grep -qx 0 "$status"; then
        RESULT=finished
    else
        RESULT=killed
    fi
    STARTED=''
    if [ -e "$status.mpi" ]; then STARTED=yes; fi
    # Told to stop while MPI could not start: nothing was done, and nothing speaks against the queue.
    if [ "$RESULT" = failed ] && [ -n "$ASKED" ] && [ -z "$STARTED" ]; then RESULT=stopped; fi
    rm -f "$status" "$status.mpi"
    echo "$1: $RESULT"
}

# Whether the last step is to be run once more, since MPI did not start (Slurm's PMI2, for one, cuts
# long messages; docs/failures.md): nothing was done yet. Twice in all.
once_more() {
    if [ -n "$STARTED$ASKED$ENDED" ] || [ "$RESULT" = finished ]; then return 1; fi
    UNSTARTED=$((UNSTARTED + 1))
    if [ "$UNSTARTED" -gt 2 ]; then return 1; fi
    echo "MPI did not start: once more"
}

# Ranks stopped, or the job was asked to while they still finished: who ends the job?
stopped() {
    if [ -n "$ENDED" ]; then exit 143; fi
    if [ "$RESULT" = killed ] && [ -z "$ASKED" ] && ! preempted; then exit 1; fi
    run_again
}

# A step, again where MPI did not start.
attempts() {
    step "$@"
    while once_more; do step "$@"; done
}

if [ ${#STAGE[@]} -gt 0 ]; then
    WORK=$STORAGE/${USER:-$(id -un)}/tilenet
    # shellcheck disable=SC2016 # expands on the nodes
    "${ONCE_PER_NODE[@]}" bash -c 'mkdir -p "$1" && cp -rp --parents "${@:2}" "$1"' copy "$WORK" "${STAGE[@]}"
fi

if [ -n "$RUN" ]; then
    RUN=$(realpath "$RUN")
    TRAIN=(train -c "$RUN" --plan "$PLAN" --output "$OUTPUT" --resume)
    attempts train ignore "${TILENET[@]}" "${TRAIN[@]}"
    if [ "$RESULT" = failed ]; then exit 1; fi
    if [ "$RESULT" != finished ] || [ -n "$ASKED$ENDED" ]; then stopped; fi
fi

if [ -n "$IMAGE" ]; then
    read -ra MORE <<<"$PREDICT"
    MAP=(predict "$OUTPUT" "$IMAGE" "$OUTPUT/map.tif" --plan "$PLAN" --overwrite --resume "${MORE[@]}")
    attempts predict take "${TILENET[@]}" "${MAP[@]}"
    if [ "$RESULT" = failed ]; then exit 1; fi
    if [ "$RESULT" != finished ] && [ -n "$ASKED" ]; then
        # Its journal grows with what is done. If nothing was, once is bad luck, twice means that
        # the job's time is too short.
        DONE=$(stat -c %s "$OUTPUT/.map.tif.journal.part" 2>/dev/null || echo 0)
        if [ -e "$OUTPUT/map.again" ] && [ "$(<"$OUTPUT/map.again")" = "$DONE" ]; then
            rm "$OUTPUT/map.again"
            echo "the map needs more time than the job has"
            exit 1
        fi
        echo "$DONE" >"$OUTPUT/map.again"
    fi
    if [ "$RESULT" != finished ]; then stopped; fi
    rm -f "$OUTPUT/map.again"
fi
