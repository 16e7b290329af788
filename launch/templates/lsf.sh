#!/bin/bash
# %%{title}
# Written by `tilenet job`.  Submit: bsub %%{script}
#BSUB -J %%{name}
#BSUB -W %%{minutes_lsf}
#BSUB %%{header}
#BSUB -o %%{name}.%J.out
#BSUB -e %%{name}.%J.err
#BSUB -wa USR1
#BSUB -wt %%{warning_min}
#BSUB -Q 75
# CHANGE, here or as options of bsub, which win: project (-P), queue (-q), time (-W). Nodes follow
# from the plan: for others, plan and write the script again. -wa, -wt: USR1 comes to this shell so
# many minutes before the limit. -Q: exit code 75 puts the job back into the queue. Both as IBM
# documents them.
set -euo pipefail

preempted() {
    false # not known here
}

run_again() {
    exit 75
}
