#!/usr/bin/env bash
# Start a virtual node's slurmd, or end all that runs on the node: node.sh FOLDER start|kill NUMBER, on
# the cluster's head. Without namespaces nodes cannot be told apart: only start works.
set -euo pipefail
folder=$1
i=$3
export SLURM_CONF=$folder/slurm.conf

if [ "$2" = kill ]; then
    [ ! -e "$folder/plain" ]
    namespace=$(readlink "/proc/$(<"$folder/slurmd-n$i.pid")/ns/uts")
    # First cut off, as when power fails: srun's helper would cancel the step of a dead srun
    ip link set "n$i" down
    for process in /proc/[0-9]*; do
        # It may end meanwhile
        [ "$(readlink "$process/ns/uts" 2>/dev/null)" = "$namespace" ] || continue
        kill -KILL "${process#/proc/}" 2>/dev/null || true
    done
    exit
fi
mkdir -p "$folder/spool-n$i"
if [ -e "$folder/plain" ]; then
    slurmd -N "n$i"
else
    ip link set "n$i" up
    # Not `ip netns exec`, which mounts another /sys, without the control groups.
    # shellcheck disable=SC2016  # the inner shell expands
    nsenter --net="/run/netns/n$i" unshare -m -u sh -c \
        'hostname "$1" && mount -t tmpfs shm /dev/shm && exec slurmd -N "$1"' node "n$i"
fi
