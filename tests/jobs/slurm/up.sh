#!/usr/bin/env bash
# Bring up a Slurm of virtual nodes on this machine: up.sh FOLDER. Needs root, and on Debian nothing
# else. All state stands in FOLDER; down.sh FOLDER ends it, and where namespaces are permitted it
# also ends by itself after $LIFETIME seconds.
#
# With namespaces the whole cluster lives in its own process, network, host-name and mount
# namespaces, so that nothing of it shows on this machine, several can stand side by side, and all
# its processes end with its first. Without them its daemons share this machine's ports.
#
# Exit 77: not possible here; stderr says why.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$1
export LIFETIME=${LIFETIME:-3600} NODES=${NODES:-3}

cannot() {
    echo "no Slurm here: $1" >&2
    exit 77
}

[ "$(id -u)" = 0 ] || cannot "virtual nodes need root"

missing=()
for needed in slurmctld:slurm-wlm slurmd:slurm-wlm srun:slurm-wlm munged:munge ip:iproute2; do
    command -v "${needed%:*}" >/dev/null || missing+=("${needed#*:}")
done
if [ ${#missing[@]} -gt 0 ]; then
    command -v apt-get >/dev/null ||
        cannot "${missing[*]} missing, and no apt-get to install them"
    export DEBIAN_FRONTEND=noninteractive
    timeout -k 5 30 apt-get update -qq >"$folder/apt.log" 2>&1 ||
        cannot "${missing[*]} missing, and apt-get update fails: $(tail -n 1 "$folder/apt.log")"
    timeout -k 5 90 apt-get install -y -qq --no-install-recommends slurm-wlm munge iproute2 \
        >>"$folder/apt.log" 2>&1 ||
        cannot "${missing[*]} missing, and apt-get install fails: $(tail -n 1 "$folder/apt.log")"
fi

if [ "${NAMESPACES:-yes}" = yes ] && timeout 10 unshare -m -n -u -p --fork --kill-child --mount-proc \
    sh -c 'hostname h && ip link add name probe type bridge && mount -t tmpfs t /dev/shm' 2>/dev/null; then
    # In a session of its own: an interrupt at the terminal must not end it before the jobs' tests.
    setsid timeout -k 1 "$LIFETIME" \
        unshare -m -n -u -p --fork --kill-child --mount-proc "$here/head.sh" "$folder" \
        >"$folder/head.log" 2>&1 </dev/null &
    echo $! >"$folder/cluster.pid"
else
    echo "no namespaces here: all virtual nodes share this machine's name and address" >&2
    touch "$folder/plain"
    "$here/daemons.sh" "$folder" >"$folder/head.log" 2>&1 </dev/null
fi

# Ready when a step has run on every node
for _ in $(seq 40); do
    if timeout 5 "$here/enter.sh" "$folder" \
        srun -Q -I2 -N "$NODES" -n "$NODES" --mpi=none true 2>"$folder/first-step.log"; then
        exit 0
    fi
    sleep 0.25
done
tail -n 5 "$folder"/*.log >&2 || true
"$here/down.sh" "$folder"
cannot "its daemons do not run a step (logs above)"
