#!/usr/bin/env bash
# run.sh test [OPTION…]: tests of one process, and those over 2 ranks.
# run.sh rest [OPTION…]: whole jobs, and tests over 3, 4 and 6 ranks.
# run.sh jobs [OPTION…]: whole jobs alone: scripts with stand-ins for launchers, ranks that hang or
#                        are killed, and a real Slurm (root, Debian).
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 # ranks share the cores; more threads than cores only wait for each other
export MPIR_CVAR_ENABLE_HEAVY_YIELD=1 # ranks of MPICH that wait let others compute

# By themselves, since other programs run in each; what a user needs to know of a Slurm that is
# missing comes at the end.
jobs=(tests/test_jobs.py tests/test_ranks_that_hang.py tests/test_ranks_that_stop.py \
    tests/launch/test_running_scripts.py tests/soak tests/slurm)

whole_jobs() {
    echo "== whole jobs"
    # A job may be started three times on a machine that does much else.
    python -m pytest -q -o faulthandler_timeout=1200 "${jobs[@]}" "$@"
}

over_ranks() {
    local ranks=$1 files
    shift
    mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.ranks' tests)
    echo "== $ranks ranks"
    # -x and `-m mpi4py`: a failure on one rank ends all; the timeout makes a hang print its stacks.
    mpiexec -n "$ranks" python -m mpi4py -m pytest -x -q --ranks "$ranks" \
        -o faulthandler_timeout=120 -o faulthandler_exit_on_timeout=true "${files[@]}" "$@"
}

part=${1:-test}
shift || true
case $part in
    test)
        # A file's tests stay together, for they share what they made.
        python -m pytest -q -n auto --maxprocesses 4 --dist loadfile tests \
            "${jobs[@]/#/--ignore=}" "$@"
        over_ranks 2 "$@"
        ;;
    rest)
        for ranks in 3 4 6; do over_ranks "$ranks" "$@"; done
        whole_jobs "$@"
        ;;
    jobs) whole_jobs "$@" ;;
    *) echo "run.sh: test, rest or jobs" >&2 && exit 2 ;;
esac
