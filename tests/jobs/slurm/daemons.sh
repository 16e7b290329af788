#!/usr/bin/env bash
# Start munge, the controller and a slurmd per virtual node: daemons.sh FOLDER. In the head's
# namespaces each node gets its own address, host name and /dev/shm (ranks of two nodes must not
# meet in shared memory); with FOLDER/plain all share this machine's.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$1

"$here/configure.sh" "$folder"
export SLURM_CONF=$folder/slurm.conf

# A munge of its own: the machine's, if there is one, stays as it is.
head -c 1024 /dev/urandom >"$folder/munge.key"
chmod 400 "$folder/munge.key"
munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"

slurmctld
for i in $(seq "$NODES"); do
    "$here/node.sh" "$folder" start "$i"
done
