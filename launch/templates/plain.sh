#!/bin/bash
# %%{title}
# Written by `tilenet job`.  Run: bash %%{script}
# To stop it with a checkpoint: kill -USR1 its process. Exit code 75: run it again to go on.
set -euo pipefail

preempted() {
    false # not known here
}

run_again() {
    exit 75
}
