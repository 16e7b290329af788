#!/usr/bin/env bash
# End what up.sh FOLDER started, and only that: by the process numbers it left in FOLDER.
set -uo pipefail
folder=$1

# The process of a file, if it still is the program that wrote it
process() {
    local number
    number=$(cat "$1" 2>/dev/null) || return 1
    case $(cat "/proc/$number/comm" 2>/dev/null) in
        timeout | slurmctld | slurmd | munged) echo "$number" ;;
        *) return 1 ;;
    esac
}

if [ -e "$folder/plain" ]; then
    SLURM_CONF=$folder/slurm.conf timeout 5 scancel --signal=KILL --full --user=root 2>/dev/null
    sleep 0.5 # for the steps to end, which outlive slurmd
fi
for signal in TERM KILL; do
    for file in "$folder"/slurmd-*.pid "$folder"/{slurmctld,munged,cluster}.pid; do
        # Inside namespaces the daemons' numbers mean other processes out here.
        [ -e "$folder/plain" ] || [ "${file##*/}" = cluster.pid ] || continue
        ! number=$(process "$file") || kill -"$signal" "$number" 2>/dev/null
    done
    for _ in $(seq 30); do
        left=0
        for file in "$folder"/slurmd-*.pid "$folder"/{slurmctld,munged,cluster}.pid; do
            [ -e "$folder/plain" ] || [ "${file##*/}" = cluster.pid ] || continue
            ! process "$file" >/dev/null || left=1
        done
        [ $left = 1 ] || exit 0
        sleep 0.1
    done
done
echo "the cluster in $folder does not end" >&2
exit 1
