#!/usr/bin/env bash
# run.sh test [OPTION…]: tests of one process, and over 2 ranks those of $heart.
# run.sh rest [OPTION…]: the others over 2, all over 3 and 4 ranks, a few over 6 (3 × 2), and beside
#                        them whole jobs, fuzzing and a Slurm, which mostly wait.
# run.sh jobs [OPTION…]: whole jobs without the rest: commands and pages of the guide as users start
#                        them, jobs that fail, hang or are killed, and a real Slurm (root, Debian).
# run.sh nightly [OPTION…]: those of whole jobs that `rest` and `jobs` leave out.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 # ranks share the cores; more threads than cores only wait for each other
export MPIR_CVAR_ENABLE_HEAVY_YIELD=1 # ranks of MPICH that wait let others compute

jobs_of() { # MARKS [OPTION…]
    # A file's tests stay together, for they share what they made. A job may be started three times
    # on a machine that does much else.
    python -m pytest -q -n 3 --dist loadfile -o faulthandler_timeout=1200 tests/jobs tests/outside \
        tests/fuzz --ignore tests/jobs/slurm -m "$@"
}

slurm_of() { # MARKS [OPTION…]
    # After the other jobs, not beside them: it takes ports and namespaces that they may use.
    python -m pytest -q -o faulthandler_timeout=1200 tests/jobs/slurm -m "$@"
}

jobs_that_mostly_wait() { # [OPTION…]
    jobs_of "not alone and not nightly" "$@"
    slurm_of "not nightly" "$@"
}

jobs_that_need_the_machine() { # [OPTION…]
    echo "== whole jobs alone"
    jobs_of "alone and not nightly" "$@"
}

over_ranks() { # RANKS "FOLDER…" [OPTION…]
    local ranks=$1 folders files
    read -ra folders <<<"$2"
    shift 2
    mapfile -t files < <(grep -rlE --include='test_*.py' "mark\.ranks\(.*\<$ranks\>" "${folders[@]}")
    echo "== $ranks ranks"
    # -x and `-m mpi4py`: a failure on one rank ends all; a hang prints its stacks and ends too.
    mpiexec -n "$ranks" python -m mpi4py -m pytest -x -q --ranks "$ranks" "${files[@]}" "$@"
}

end_background() { # the group of processes of $background
    kill -INT -- "-$background" 2>/dev/null || return 0 # pytest ends what its tests have started
    for _ in {1..60}; do
        kill -0 -- "-$background" 2>/dev/null || return 0
        sleep 0.5
    done
    kill -KILL -- "-$background" 2>/dev/null || true
}

tell_background() {
    echo "== whole jobs, beside the ranks"
    cat "$said"
    rm -f "$said"
}

heart="tests/exactness tests/parallel tests/regression"
others="tests/cli tests/data tests/library tests/mapping tests/training"
part=${1:-test}
shift || true
case $part in
    test)
        python -m pytest -q -n auto --maxprocesses 4 --dist loadfile tests --ignore tests/jobs \
            --ignore tests/outside --ignore tests/fuzz "$@"
        over_ranks 2 "$heart" "$@"
        ;;
    rest)
        said=$(mktemp)
        set -m # a group of its own, by which it is ended
        jobs_that_mostly_wait "$@" </dev/null >"$said" 2>&1 &
        background=$!
        set +m
        trap 'end_background; tell_background' EXIT # the status stays that of what failed
        over_ranks 2 "$others" "$@"
        for ranks in 3 4 6; do over_ranks "$ranks" "$heart $others" "$@"; done
        wait "$background" # if it failed, all did
        trap - EXIT
        tell_background
        jobs_that_need_the_machine "$@"
        ;;
    jobs)
        jobs_that_mostly_wait "$@"
        jobs_that_need_the_machine "$@"
        ;;
    nightly)
        jobs_of nightly "$@"
        slurm_of nightly "$@"
        ;;
    *) echo "run.sh: test, rest, jobs or nightly" >&2 && exit 2 ;;
esac
