#!/usr/bin/env bash
# The first process of the cluster's namespaces: head.sh FOLDER. Makes the network, starts the
# daemons and waits; when it ends, the kernel ends everything in its process namespace.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$1

hostname head
{
    echo "127.0.0.1 localhost"
    echo "10.77.0.1 head"
    for i in $(seq "$NODES"); do echo "10.77.0.$((10 + i)) n$i"; done
} >"$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts
# Nobody answers names in here: asking would cost torch 10 s.
[ ! -e /etc/resolv.conf ] || mount --bind /dev/null /etc/resolv.conf

mkdir -p /run/netns
mount -t tmpfs networks /run/netns
ip link set lo up
ip link add name nodes type bridge
ip addr add 10.77.0.1/24 dev nodes
ip link set nodes up
for i in $(seq "$NODES"); do
    ip netns add "n$i"
    ip link add name "n$i" type veth peer name eth0 netns "n$i"
    ip link set "n$i" master nodes up
    ip -n "n$i" addr add "10.77.0.$((10 + i))/24" dev eth0
    ip -n "n$i" link set lo up
    ip -n "n$i" link set eth0 up
done

"$here/daemons.sh" "$folder"
sleep infinity &
wait $! # not exec: a first process has orphans to reap, which bash does
