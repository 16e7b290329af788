#!/bin/bash
# %%{title}
# Written by `tilenet job`.  Submit: sbatch %%{script}
#SBATCH --job-name=%%{name}
#SBATCH --time=%%{minutes}
#SBATCH %%{header}
#SBATCH --exclusive
#SBATCH --output=%%{name}.%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@%%{warning_s}
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
