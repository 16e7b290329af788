#!/bin/bash
# %%{title}
# Written by `python -m launch`.  Submit: sbatch %%{script}
#SBATCH --job-name=%%{name}
#SBATCH --time=%%{minutes}
#SBATCH %%{header}
#SBATCH --exclusive
#SBATCH --output=%%{name}.%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@%%{warning_s}
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
