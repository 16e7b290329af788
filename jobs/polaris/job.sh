#!/bin/bash -l
# Train, then map, on polaris: 4 nodes, 8 ranks (2 a node), each with 2 devices and 16 cores.
# Written by `tilenet job`; how to install, and more: jobs/README.md. Start it: qsub job.sh
#PBS -N tilenet -k doe -r y -l walltime=1:00:00 -A ABC123 -q debug-scaling
#PBS -l select=4:system=polaris -l place=scatter:excl -l filesystems=home:eagle
# CHANGE, here or as options of qsub, which win: project, queue, time (and --stop-after below with it)
set -e
cd "$PBS_O_WORKDIR"
module load conda
VENV=${VENV-venv} # with tilenet; empty: tilenet is there without
# shellcheck source=/dev/null
[ -z "$VENV" ] || source "$VENV/bin/activate"
export OMP_NUM_THREADS=16 MPICH_GPU_SUPPORT_ENABLED=1 CUDA_VISIBLE_DEVICES=3,2,1,0

# CHANGE, here or in the environment: RUN= IMAGE=other.tif only maps another image
RUN=${RUN-run.yaml} # the run file; empty: only map
IMAGE=${IMAGE-scene.tif} # the raster to map; empty: only train
PLAN=${PLAN-plan.json} OUTPUT=${OUTPUT-out} # the run's folder
PREDICT=${PREDICT-} # more of tilenet predict: --output probabilities --tile 1024
STAGE=() # for each node's /local/scratch: relative paths of all the run file names, IMAGE

exec tilenet batch --scheduler=pbs --stop-after=3000 --run="$RUN" --plan="$PLAN" --image="$IMAGE" \
    --output="$OUTPUT" --predict="$PREDICT" --stage "${STAGE[@]}" --storage=/local/scratch \
    --once-per-node="mpiexec -n 4 --ppn 1 --hostfile $PBS_NODEFILE" \
    --program="python -c 'import sys; from mpi4py import MPI; from tilenet.__main__ import main; sys.exit(main())'" \
    -- mpiexec -n 8 --ppn 2 --depth 16 --cpu-bind depth --hostfile "$PBS_NODEFILE"
