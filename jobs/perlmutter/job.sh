#!/bin/bash
# Train, then map, on perlmutter: 2 nodes, 4 ranks (2 a node), each with 2 devices and 32 cores.
# Written by `tilenet job`; how to install, and more: jobs/README.md. Start it: sbatch job.sh
#SBATCH --time=120 --account=m1234_g --qos=regular --constraint=gpu
#SBATCH --nodes=2 --ntasks-per-node=2 --cpus-per-task=64 --gpus-per-node=4 --exclusive --mem=0
#SBATCH --job-name=tilenet --output=tilenet.%j.out --open-mode=append --requeue --signal=B:USR1@600
# CHANGE, here or as options of sbatch, which win: account, partition, time
# CHANGE: --constraint='gpu&hbm80g' for 80 GB per GPU.
set -e
module load pytorch
VENV=${VENV-venv} # with tilenet; empty: tilenet is there without
# shellcheck source=/dev/null
[ -z "$VENV" ] || source "$VENV/bin/activate"
export OMP_NUM_THREADS=32 MPICH_GPU_SUPPORT_ENABLED=1

# CHANGE, here or in the environment: RUN= IMAGE=other.tif only maps another image
RUN=${RUN-run.yaml} # the run file; empty: only map
IMAGE=${IMAGE-scene.tif} # the raster to map; empty: only train
PLAN=${PLAN-plan.json} OUTPUT=${OUTPUT-out} # the run's folder
PREDICT=${PREDICT-} # more of tilenet predict: --output probabilities --tile 1024
STAGE=() # for each node's /tmp: relative paths of all the run file names, IMAGE

exec tilenet batch --scheduler=slurm --run="$RUN" --plan="$PLAN" --image="$IMAGE" --output="$OUTPUT" \
    --predict="$PREDICT" --stage "${STAGE[@]}" --storage=/tmp \
    --once-per-node="srun -N 2 -n 2 --ntasks-per-node=1 -c 1 --mpi=none --kill-on-bad-exit=1" \
    -- srun -N 2 -n 4 --ntasks-per-node=2 -c 64 --gpus-per-node=4 --gpu-bind=none --mpi=cray_shasta \
    --kill-on-bad-exit=1 --wait=60
