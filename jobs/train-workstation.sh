#!/bin/bash
# Train on a workstation, then map an image.  jobs/train-workstation.sh
#
# To stop it with a checkpoint: kill -USR1 the mpiexec that it started; it then ends with 75. Run
# again, it goes on from its last checkpoint.
# Install once: python -m venv venv; venv/bin/pip install -c constraints.txt '.[mpich]'
set -euo pipefail

# CHANGE, here or in the environment. RUN empty: only map. IMAGE empty: only train.
# PARTITIONS: GPUs per rank, which makes ranks fewer; empty: one GPU, partitions as in the run file.
RUN=${RUN-run.yaml}
IMAGE=${IMAGE-scene.tif}
OUTPUT=${OUTPUT:-out}
PARTITIONS=${PARTITIONS:-}
# GPUs that nvidia-smi shows; without one, 2 ranks on the CPU, or as many as RANKS says.
GPUS=${GPUS:-$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)}
RANKS=${RANKS:-$((GPUS > 0 ? GPUS / ${PARTITIONS:-1} : 2))}
VENV=${VENV:-}
# shellcheck source=/dev/null
[ -z "$VENV" ] || source "$VENV/bin/activate"

CORES=$(($(nproc) / RANKS))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((CORES > 0 ? CORES : 1))}
SPLIT=()
[ -z "$PARTITIONS" ] || SPLIT=(--partitions "$PARTITIONS")

# mpiexec ends all ranks when one dies, and with what they end with.
if [ -n "$RUN" ]; then
    mpiexec -n "$RANKS" tilenet train -c "$RUN" --output "$OUTPUT" "${SPLIT[@]}" --resume
fi
if [ -n "$IMAGE" ]; then
    mpiexec -n "$RANKS" tilenet predict "$OUTPUT" "$IMAGE" "$OUTPUT/map.tif" "${SPLIT[@]}" \
        --overwrite
fi
