#!/usr/bin/env bash
# All tests but those of whole jobs (make jobs): first those of one process, then tests/parallel/ on
# 1, 2, 3, 4 and 6 ranks.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 # ranks share the cores; more threads than cores only wait for each other

python -m pytest -q tests --ignore tests/parallel --ignore tests/slurm --ignore tests/test_jobs.py \
    --ignore tests/test_ranks_that_hang.py --ignore tests/launch/test_running_scripts.py "$@"
for ranks in 1 2 3 4 6; do
    echo "== $ranks ranks"
    # -x and `-m mpi4py`: a failure on one rank ends all; the timeout makes a hang print its stacks.
    mpiexec -n "$ranks" python -m mpi4py -m pytest -x -q -o faulthandler_timeout=120 \
        -o faulthandler_exit_on_timeout=true tests/parallel "$@"
done
