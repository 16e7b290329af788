#!/bin/bash
# Train, then map, on frontier: 2 nodes, 16 ranks (8 a node), each with 1 device and 7 cores.
# Written by `tilenet job`. Start it: sbatch job.sh
#SBATCH --time=120 --account=ABC123 --partition=batch --constraint=nvme
#SBATCH --nodes=2 --ntasks-per-node=8 --cpus-per-task=7 --gpus-per-node=8 --exclusive
#SBATCH --core-spec=8
#SBATCH --job-name=tilenet --output=tilenet.%j.out --open-mode=append
#SBATCH --requeue --signal=B:USR1@600
# CHANGE, here or as options of sbatch, which win: account, partition, time. --signal: as
# many seconds before the limit USR1 comes, or a minute earlier; half the time at most.
# Nodes, tasks, cores and GPUs follow from the plan: for others, plan and write this again.
set -e

# Install once, on a login node. torch for ROCm has an index of its own; mpi4py is built against
# Cray MPICH; the rest comes from PyPI. With the modules below loaded:
#     python -m venv venv; source venv/bin/activate
#     pip install torch --index-url https://download.pytorch.org/whl/rocm6.2
#     MPICC='cc -shared' pip install --no-cache-dir --no-binary=mpi4py mpi4py
#     pip install .    # in the checkout
# CHANGE: versions; torch's ROCm and the module's are the same.
module load PrgEnv-gnu rocm craype-accel-amd-gfx90a miniforge3
VENV=${VENV-venv} # with tilenet; empty: tilenet is there without
# shellcheck source=/dev/null
[ -z "$VENV" ] || source "$VENV/bin/activate"
export OMP_NUM_THREADS=7 MPICH_GPU_SUPPORT_ENABLED=1 NCCL_SOCKET_IFNAME=hsn0 \
    FI_CXI_RDZV_PROTO=alt_read MIOPEN_USER_DB_PATH=/tmp/tilenet-miopen \
    MIOPEN_CUSTOM_CACHE_DIR=/tmp/tilenet-miopen

# CHANGE, here or in the environment: RUN= IMAGE=other.tif only maps another image
RUN=${RUN-run.yaml} # the run file; empty: only map
PLAN=${PLAN-plan.json}
IMAGE=${IMAGE-scene.tif} # the raster to map; empty: only train
OUTPUT=${OUTPUT-out} # the run's folder
PREDICT=${PREDICT-} # more of tilenet predict: --output probabilities --tile 1024
# To copy to each node's /mnt/bb: relative paths of all the run file names, and IMAGE
STAGE=()

exec tilenet batch --scheduler=slurm --run="$RUN" --plan="$PLAN" --image="$IMAGE" \
    --output="$OUTPUT" --predict="$PREDICT" --stage "${STAGE[@]}" --storage=/mnt/bb \
    --once-per-node="srun -N 2 -n 2 --ntasks-per-node=1 -c 1 --mpi=none --kill-on-bad-exit=1" \
    --program="python -c 'import sys; from mpi4py import MPI; from tilenet.__main__ import main; sys.exit(main())'" \
    -- srun -N 2 -n 16 --ntasks-per-node=8 -c 7 --gpus-per-task=1 --gpu-bind=closest \
    --mpi=cray_shasta --kill-on-bad-exit=1 --wait=60 --network=disable_rdzv_get
