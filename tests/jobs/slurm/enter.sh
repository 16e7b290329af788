#!/usr/bin/env bash
# Run a command on the head of the cluster: enter.sh FOLDER COMMAND [ARGUMENT…].
set -euo pipefail
folder=$1
shift
export SLURM_CONF=$folder/slurm.conf
[ ! -e "$folder/plain" ] || exec "$@"
# cluster.pid is of timeout; its child is unshare, and that one's child the namespaces' first process
read -r holder <"$folder/cluster.pid"
read -r unshare _ <"/proc/$holder/task/$holder/children" || [ "$unshare" ] # no newline at its end
read -r first _ <"/proc/$unshare/task/$unshare/children" || [ "$first" ]
# shellcheck disable=SC2016  # the inner shell expands: a mount namespace begins at its root
exec nsenter --target "$first" --mount --net --uts --pid -- \
    sh -c 'cd "$1" && shift && exec "$@"' enter "$PWD" "$@"
