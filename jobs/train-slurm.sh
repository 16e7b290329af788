#!/bin/bash
# Train and map on a Slurm cluster: one rank per GPU.  sbatch jobs/train-slurm.sh
#SBATCH --job-name=tilenet
#SBATCH --time=02:00:00
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --signal=USR1@120
#SBATCH --open-mode=append
# CHANGE above: time, nodes, GPUs a node (twice), cores a GPU. Below: what to run, and the MPI.
set -euo pipefail

RUN=run.yaml
IMAGE=scene.tif
OUTPUT=out
# The plug-in that belongs to mpi4py's MPI: pmi2 for mpich, pmix for Open MPI, cray_shasta for Cray.
# With the wrong one each rank would be alone; tilenet notices and says so.
MPI=pmi2

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# srun does not inherit --cpus-per-task (since Slurm 22.05). Every rank sees all GPUs of its node and
# takes the one of its number there. A rank that dies ends the step.
STEP=(--mpi="$MPI" --cpus-per-task="$SLURM_CPUS_PER_TASK" --gpu-bind=none --kill-on-bad-exit=1)

# Two minutes before the time limit Slurm sends USR1 to the ranks; they write a checkpoint and end
# with 75. Submit again to go on.
srun "${STEP[@]}" tilenet train -c "$RUN" --output "$OUTPUT" --resume
srun "${STEP[@]}" tilenet predict "$OUTPUT" "$IMAGE" "$OUTPUT/map.tif" --overwrite
