#!/bin/bash
# Train, then map, on slurm: 2 nodes, 4 ranks (2 a node), each with 2 devices and 32 cores.
# Written by `tilenet job`. Start it: sbatch job.sh
#SBATCH --time=120
#SBATCH --nodes=2 --ntasks-per-node=2 --cpus-per-task=32 --gpus-per-node=4 --exclusive
#SBATCH --job-name=tilenet --output=tilenet.%j.out --open-mode=append
#SBATCH --requeue --signal=B:USR1@600
# CHANGE, here or as options of sbatch, which win: account, partition, time. --signal: as
# many seconds before the limit USR1 comes, or a minute earlier; half the time at most.
# Nodes, tasks, cores and GPUs follow from the plan: for others, plan and write this again.
set -e

# Install once: python -m venv venv; venv/bin/pip install -c constraints.txt '.[mpich]'
# or with the site's MPI, which knows the network: in the environment
#     MPICC=mpicc pip install --no-binary=mpi4py mpi4py; pip install .
# srun's --mpi below belongs to mpi4py's MPI: pmi2 to mpich, pmix to Open MPI, cray_shasta to Cray
# MPICH; srun --mpi=list names what there is. With the wrong one each rank would be alone; tilenet
# notices, and says so. CHANGE it there if need be, or as launch.mpi of a machine of your own.
# Where srun says 'mpi/pmi2: invalid client request': export MPIR_CVAR_CH4_NETMOD=ofi below
# (docs/failures.md says why).
VENV=${VENV-''} # with tilenet; empty: tilenet is there without
# shellcheck source=/dev/null
[ -z "$VENV" ] || source "$VENV/bin/activate"
export OMP_NUM_THREADS=32

# CHANGE, here or in the environment: RUN= IMAGE=other.tif only maps another image
RUN=${RUN-run.yaml} # the run file; empty: only map
PLAN=${PLAN-plan.json}
IMAGE=${IMAGE-scene.tif} # the raster to map; empty: only train
OUTPUT=${OUTPUT-out} # the run's folder
PREDICT=${PREDICT-} # more of tilenet predict: --output probabilities --tile 1024
# To copy to each node's /tmp: relative paths of all the run file names, and IMAGE
STAGE=()

exec tilenet batch --scheduler=slurm --run="$RUN" --plan="$PLAN" --image="$IMAGE" \
    --output="$OUTPUT" --predict="$PREDICT" --stage "${STAGE[@]}" --storage=/tmp \
    --once-per-node="srun -N 2 -n 2 --ntasks-per-node=1 -c 1 --mpi=none --kill-on-bad-exit=1" \
    -- srun -N 2 -n 4 --ntasks-per-node=2 -c 32 --gpus-per-node=4 --gpu-bind=none --mpi=pmi2 \
    --kill-on-bad-exit=1 --wait=60
