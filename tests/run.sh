#!/usr/bin/env bash
# All tests: first those of one process, then whole jobs (also make jobs), then tests/parallel/ on 1,
# 2, 3, 4 and 6 ranks. run.sh jobs [OPTION…]: only whole jobs.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 # ranks share the cores; more threads than cores only wait for each other
export MPIR_CVAR_ENABLE_HEAVY_YIELD=1 # ranks of MPICH that wait let others compute

# Scripts with stand-ins for launchers, ranks that hang or are killed, and a real Slurm: by themselves,
# since other programs run in each, and what a user needs to know of a Slurm that is missing comes at
# the end.
jobs=(tests/test_jobs.py tests/test_ranks_that_hang.py tests/test_ranks_that_stop.py \
    tests/launch/test_running_scripts.py tests/soak tests/slurm)
long=(-o faulthandler_timeout=1200) # a job may be started three times on a machine that does much else
if [ "${1-}" = jobs ]; then
    exec python -m pytest -q "${long[@]}" "${jobs[@]}" "${@:2}"
fi

# A file's tests stay together, for they share what they made.
python -m pytest -q -n auto --maxprocesses 4 --dist loadfile tests --ignore tests/parallel \
    "${jobs[@]/#/--ignore=}" "$@"
echo "== jobs"
python -m pytest -q "${long[@]}" "${jobs[@]}" "$@"
for ranks in 1 2 3 4 6; do
    echo "== $ranks ranks"
    # -x and `-m mpi4py`: a failure on one rank ends all; the timeout makes a hang print its stacks.
    mpiexec -n "$ranks" python -m mpi4py -m pytest -x -q -o faulthandler_timeout=120 \
        -o faulthandler_exit_on_timeout=true tests/parallel "$@"
done
