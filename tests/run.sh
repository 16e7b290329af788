#!/usr/bin/env bash
# run.sh test [OPTION…]: tests of one process, and over 2 ranks those of exactness/ and parallel/.
# run.sh rest [OPTION…]: the others over 2, all over 3 and 4 ranks, a few over 6 (3 × 2), fuzzing,
#                        and whole jobs.
# run.sh jobs [OPTION…]: whole jobs alone: commands and pages of the guide as users start them, jobs
#                        that fail, hang or are killed, and a real Slurm (root, Debian).
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 # ranks share the cores; more threads than cores only wait for each other
export MPIR_CVAR_ENABLE_HEAVY_YIELD=1 # ranks of MPICH that wait let others compute

whole_jobs() {
    echo "== whole jobs"
    # Most wait for something; a file's tests stay together, for they share what they made. A job may
    # be started three times on a machine that does much else.
    python -m pytest -q -n 3 --dist loadfile -o faulthandler_timeout=1200 tests/jobs tests/outside \
        tests/fuzz \
        --ignore tests/jobs/slurm --ignore tests/jobs/soak "$@"
    # These have the machine's ports and namespaces to themselves; what a user needs to know of a Slurm
    # that is missing comes at the end.
    python -m pytest -q -o faulthandler_timeout=1200 tests/jobs/soak tests/jobs/slurm "$@"
}

over_ranks() { # RANKS "FOLDER…" [OPTION…]
    local ranks=$1 folders files
    read -ra folders <<<"$2"
    shift 2
    mapfile -t files < <(grep -rlE --include='test_*.py' "mark\.ranks\([^)]*\<$ranks\>" "${folders[@]}")
    echo "== $ranks ranks"
    # -x and `-m mpi4py`: a failure on one rank ends all; the timeout makes a hang print its stacks.
    mpiexec -n "$ranks" python -m mpi4py -m pytest -x -q --ranks "$ranks" \
        -o faulthandler_timeout=120 -o faulthandler_exit_on_timeout=true "${files[@]}" "$@"
}

heart="tests/exactness tests/parallel"
others="tests/cli tests/data tests/mapping tests/training"
part=${1:-test}
shift || true
case $part in
    test)
        python -m pytest -q -n auto --maxprocesses 4 --dist loadfile tests --ignore tests/jobs \
            --ignore tests/outside --ignore tests/fuzz "$@"
        over_ranks 2 "$heart" "$@"
        ;;
    rest)
        over_ranks 2 "$others" "$@"
        for ranks in 3 4 6; do over_ranks "$ranks" "$heart $others" "$@"; done
        whole_jobs "$@"
        ;;
    jobs) whole_jobs "$@" ;;
    *) echo "run.sh: test, rest or jobs" >&2 && exit 2 ;;
esac
