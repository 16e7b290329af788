# --- nodes: %%{least} to %%{most}, as many of the job's as answer. Where one dies, the others go on from
# the last checkpoint, with the plan made again for them: the same tiles, fewer ranks.
LEAST=%%{least} RANKS_PER_NODE=%%{per_node}
PLANNED=$PLAN PLAN=$OUTPUT/plan.now.json
SRUN=("${LAUNCH[@]}") ONCE=("${ONCE_PER_NODE[@]}") ANSWER=() HEIR=''

# Which of the job's nodes run what they are given: Slurm may not know yet that one is dead.
look() {
    local name nodes try
    for try in 1 2 3 4 5; do # the controller may not answer while it waits for a dead node
        if nodes=$(squeue -h -j "$SLURM_JOB_ID" -o %N) && [ -n "$nodes" ]; then break; fi
        sleep "$try"
    done
    mapfile -t ANSWER < <(
        for name in $(scontrol show hostnames "$nodes"); do
            {
                timeout -k 1 60 srun -N 1 -n 1 -w "$name" --overlap --mpi=none -Q true </dev/null &&
                    echo "$name"
            } &
        done | sort -V
    )
}

# Runs on the job's last node. Slurm keeps a job of which the first node has died, the one that
# runs this script, and nothing happens any more (seen with 22.05): back into the queue.
# shellcheck disable=SC2016 # expands on that node
WATCH='
while sleep 30; do
    nodes=$(squeue -h -t running -j "$1" -o %N) && [ -n "$nodes" ] || continue
    scontrol show hostnames "$nodes" | grep -qx "$2" || exec scontrol requeue "$1"
done
'

# Plan for the nodes that answer; of these the most for which there is a plan.
settle() {
    local count names
    if [ ${#ANSWER[@]} = 0 ]; then
        echo "not even the node of this script takes a step: srun does not work here"
        exit 1
    fi
    if [ ${#ANSWER[@]} -lt "$LEAST" ]; then
        echo "${#ANSWER[@]} of the job's nodes answer (${ANSWER[*]}), at least $LEAST must"
        ASKED=yes
        run_again
    fi
    for ((count = ${#ANSWER[@]}; count >= LEAST; count--)); do
        "${TILENET[@]}" plan --again "$PLANNED" --nodes "$count" -o "$PLAN" >/dev/null || continue
        names=$(IFS=, && echo "${ANSWER[*]:0:count}")
        echo "nodes: $names, ranks: $((count * RANKS_PER_NODE))"
        LAUNCH=("${SRUN[@]}" -N "$count" -n "$((count * RANKS_PER_NODE))" -w "$names")
        ONCE_PER_NODE=("${ONCE[@]}" -N "$count" -n "$count" -w "$names")
        if [ -n "$HEIR" ]; then kill "$HEIR" 2>/dev/null || true; fi
        if [ "$count" -gt 1 ]; then
            srun -N 1 -n 1 -w "${names##*,}" --overlap --mpi=none -Q -J watch \
                bash -c "$WATCH" watch "$SLURM_JOB_ID" "$SLURMD_NODENAME" </dev/null &
            HEIR=$!
        fi
        return
    done
    exit 1
}

# Whether Slurm has let the last step go. One whose ranks end just before Slurm gives their node up
# it may hold forever (seen with 22.05), and with it all devices of the job.
let_go() {
    local second
    for ((second = 0; second < 90; second++)); do
        if ! squeue -h -s -j "$SLURM_JOB_ID" -o '%i %j' |
            grep -qv -e '\.batch ' -e '\.extern ' -e ' watch$'; then return 0; fi
        sleep 1
    done
    return 1
}

# A step, again and again as long as it fails because nodes died, or MPI did not start.
lives() {
    local before
    while :; do
        step "$@"
        if [ "$RESULT" = finished ] || [ "$RESULT" = stopped ] || [ -n "$ENDED" ]; then return; fi
        before=${#ANSWER[@]}
        look
        if [ ${#ANSWER[@]} -ge "$before" ]; then # the nodes are not to blame
            if once_more; then continue; fi
            return
        fi
        if [ -n "$ASKED" ]; then
            RESULT=killed
            return
        fi
        if ! let_go; then
            echo "Slurm does not let go of the step that lost a node: this needs a new allocation"
            ASKED=yes
            run_again
        fi
        settle
    done
}

look
settle

