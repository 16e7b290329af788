#!/bin/bash
# Train, then map, on workstation: 1 node, 2 ranks (2 a node), each with 1 device and 16 cores.
# Written by `tilenet job`; how to install, and more: jobs/README.md. Start it: bash job.sh
# To stop it with a checkpoint: kill -USR1 its process. Exit code 75: run it again
set -e
VENV=${VENV-''} # with tilenet; empty: tilenet is there without
# shellcheck source=/dev/null
[ -z "$VENV" ] || source "$VENV/bin/activate"
export OMP_NUM_THREADS=16

# CHANGE, here or in the environment: RUN= IMAGE=other.tif only maps another image
RUN=${RUN-run.yaml} # the run file; empty: only map
IMAGE=${IMAGE-scene.tif} # the raster to map; empty: only train
PLAN=${PLAN-plan.json} OUTPUT=${OUTPUT-out} # the run's folder
PREDICT=${PREDICT-} # more of tilenet predict: --output probabilities --tile 1024
STAGE=() # for each node's /tmp: relative paths of all the run file names, IMAGE

exec tilenet batch --scheduler=none --run="$RUN" --plan="$PLAN" --image="$IMAGE" --output="$OUTPUT" \
    --predict="$PREDICT" --stage "${STAGE[@]}" --storage=/tmp --once-per-node="mpiexec -n 1" \
    -- mpiexec -n 2
