#!/bin/bash
# Train, then map, on frontier: 2 nodes, 16 ranks (8 a node), each with 1 device and 7 cores.
# Written by `tilenet job`; how to install, and more: jobs/README.md. Start it: sbatch job.sh
#SBATCH --time=120 --account=ABC123 --partition=batch --constraint=nvme
#SBATCH --nodes=2 --ntasks-per-node=8 --cpus-per-task=7 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --core-spec=8
#SBATCH --job-name=tilenet --output=tilenet.%j.out --open-mode=append --requeue --signal=B:USR1@600
# CHANGE, here or as options of sbatch, which win: account, partition, time
set -e
module load PrgEnv-gnu rocm craype-accel-amd-gfx90a miniforge3
VENV=${VENV-venv} # with tilenet; empty: tilenet is there without
# shellcheck source=/dev/null
[ -z "$VENV" ] || source "$VENV/bin/activate"
export OMP_NUM_THREADS=7 MPICH_GPU_SUPPORT_ENABLED=1 NCCL_SOCKET_IFNAME=hsn0 FI_CXI_RDZV_PROTO=alt_read \
    MIOPEN_USER_DB_PATH=/tmp/tilenet-miopen MIOPEN_CUSTOM_CACHE_DIR=/tmp/tilenet-miopen

# CHANGE, here or in the environment: RUN= IMAGE=other.tif only maps another image
RUN=${RUN-run.yaml} # the run file; empty: only map
IMAGE=${IMAGE-scene.tif} # the raster to map; empty: only train
PLAN=${PLAN-plan.json} OUTPUT=${OUTPUT-out} # the run's folder
PREDICT=${PREDICT-} # more of tilenet predict: --output probabilities --tile 1024
STAGE=() # for each node's /mnt/bb: relative paths of all the run file names, IMAGE

exec tilenet batch --scheduler=slurm --run="$RUN" --plan="$PLAN" --image="$IMAGE" --output="$OUTPUT" \
    --predict="$PREDICT" --stage "${STAGE[@]}" --storage=/mnt/bb \
    --once-per-node="srun -N 2 -n 2 --ntasks-per-node=1 -c 1 --mpi=none --kill-on-bad-exit=1" \
    --program="python -c 'import sys; from mpi4py import MPI; from tilenet.__main__ import main; sys.exit(main())'" \
    -- srun -N 2 -n 16 --ntasks-per-node=8 -c 7 --gpus-per-task=1 --gpu-bind=closest --mpi=cray_shasta \
    --kill-on-bad-exit=1 --wait=60 --network=disable_rdzv_get
