#!/usr/bin/env bash
# Write slurm.conf and its neighbours: configure.sh FOLDER. Nodes have more cores than the machine
# and GPUs that are copies of /dev/null: Slurm counts and assigns them like real ones.
set -euo pipefail
folder=$1
cores=64
gpus=4

for i in $(seq 0 $((gpus - 1))); do
    mknod "$folder/gpu$i" c 1 3 2>/dev/null || ln -sf /dev/null "$folder/gpu$i"
done
echo "NodeName=n[1-$NODES] Name=gpu File=$folder/gpu[0-$((gpus - 1))]" >"$folder/gres.conf"
echo "CgroupPlugin=cgroup/v1" >"$folder/cgroup.conf" # named, it need not be mounted

head="head(10.77.0.1)"
port=26817
if [ -e "$folder/plain" ]; then
    head="$(hostname -s)(127.0.0.1)"
    port=$((20000 + $$ % 10000)) # another cluster may stand next to it
fi
{
    cat <<CONF
ClusterName=tilenet
SlurmctldHost=$head
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
MpiDefault=none
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
SlurmdSpoolDir=$folder/spool-%n
StateSaveLocation=$folder/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
KillWait=5
SlurmdTimeout=15
MinJobAge=600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=10 PriorityTier=1 GraceTime=20 State=UP
PartitionName=urgent Nodes=ALL MaxTime=10 PriorityTier=10 PreemptMode=OFF State=UP
CONF
    for i in $(seq "$NODES"); do
        where="NodeHostname=n$i NodeAddr=10.77.0.$((10 + i)) Port=26818"
        if [ -e "$folder/plain" ]; then
            where="NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=$((port + i))"
        fi
        echo "NodeName=n$i $where Sockets=2 CoresPerSocket=$((cores / 2)) ThreadsPerCore=1" \
            "RealMemory=64000 Gres=gpu:$gpus State=UNKNOWN"
    done
} >"$folder/slurm.conf"
mkdir -p "$folder/state"
