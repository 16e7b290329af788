
# --- what to run, and on what: CHANGE
RUN=%%{run}
PLAN=%%{plan}
IMAGE=%%{image}
OUTPUT=%%{output}
# Files and folders, by relative paths, that are copied to each node's own storage first; the paths
# in the run file then lead to the copies. Name all that it names, and IMAGE; empty: nothing is copied.
STAGE=(%%{stage})
STORAGE=%%{storage}

# --- the machine: %%{machine}
%%{modules}%%{environment}
# %%{layout}
LAUNCH=(
%%{launch}
)
ONCE_PER_NODE=(
%%{once_per_node}
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
