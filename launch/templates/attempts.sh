# A step, again where MPI did not start.
attempts() {
    step "$@"
    while once_more; do step "$@"; done
}

