#!/bin/bash -l
# Train, then map, on tuolumne: 4 nodes, 16 ranks (4 a node), each with 1 device and 21 cores.
# Written by `tilenet job`; how to install, and more: jobs/README.md. Start it: flux batch job.sh
# flux: --time-limit=120m --nodes=4 --exclusive --bank=ABC123
# flux: --job-name=tilenet --output=tilenet.{{id}}.out --signal=USR1@600s
# CHANGE, here or as options of flux batch, which win: bank, queue, time
set -e
module load rocm cray-python
VENV=${VENV-venv} # with tilenet; empty: tilenet is there without
# shellcheck source=/dev/null
[ -z "$VENV" ] || source "$VENV/bin/activate"
export OMP_NUM_THREADS=21 MPICH_GPU_SUPPORT_ENABLED=1

# CHANGE, here or in the environment: RUN= IMAGE=other.tif only maps another image
RUN=${RUN-run.yaml} # the run file; empty: only map
IMAGE=${IMAGE-scene.tif} # the raster to map; empty: only train
PLAN=${PLAN-plan.json} OUTPUT=${OUTPUT-out} # the run's folder
PREDICT=${PREDICT-} # more of tilenet predict: --output probabilities --tile 1024
STAGE=() # for each node's /tmp: relative paths of all the run file names, IMAGE

exec tilenet batch --scheduler=flux --run="$RUN" --plan="$PLAN" --image="$IMAGE" --output="$OUTPUT" \
    --predict="$PREDICT" --stage "${STAGE[@]}" --storage=/tmp \
    --once-per-node="flux run -N 4 -n 4 --setopt=exit-on-error" \
    --program="python -c 'import sys; from mpi4py import MPI; from tilenet.__main__ import main; sys.exit(main())'" \
    -- flux run -N 4 -n 16 -c 21 -g 1 --exclusive --setopt=cpu-affinity=per-task --setopt=exit-on-error \
    --setopt=exit-timeout=60s
