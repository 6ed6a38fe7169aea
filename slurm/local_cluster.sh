#!/bin/bash
# A real Slurm on this machine alone, from the distribution's packages: 2 nodes with 2 fake GPUs each.
#
#   slurm/local_cluster.sh up       start it, and print the line that points sbatch, srun and squeue at it
#   slurm/local_cluster.sh status   its nodes and jobs; exit status 1 when it is down
#   slurm/local_cluster.sh down     cancel its jobs, stop it, leave nothing behind
#
# It needs no root. Keys, sockets, logs and settings live in one folder of its own (WORKSHOP_SLURM_DIR), its ports
# are not Slurm's usual ones, and it reads nothing under /etc/slurm: a Slurm that is already here stays as it is.
set -euo pipefail
umask 077 # the folder holds the key that lets a process run jobs as this user

PATH=$PATH:/usr/sbin:/sbin # where the daemons are; an ordinary user's PATH may lack it
state=$(realpath -m -- "${WORKSHOP_SLURM_DIR:-/tmp/workshop-slurm-$UID}")
user=$(id -un)
# As node names these addresses resolve everywhere, so a job can use one as MASTER_ADDR, and nothing goes in /etc/hosts.
nodes=(127.0.0.1 127.0.0.2)

fail() { # STATUS MESSAGE
    echo "local_cluster.sh: $2" >&2
    exit "$1"
}

wait_for() { # SECONDS COMMAND...: until the command succeeds
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        ((SECONDS < end)) || return 1
        sleep 0.2
    done
}

is_ours() { [[ -O $state ]] && grep -qs '^ClusterName=workshop$' "$state/slurm.conf"; }

alive() { # NAME: print its process id; a stale pid file may name a stranger, so look for our folder in its command line
    local pid
    pid=$(cat "$state/$1.pid" 2>/dev/null) && grep -qsF -- "$state/" "/proc/$pid/cmdline" && echo "$pid"
}

daemons() {
    local name
    for name in munged slurmctld "${nodes[@]/#/slurmd-}"; do alive "$name" || true; done
}

all_alive() { [[ $(daemons | wc -l) -eq 4 ]]; } # munged, slurmctld and two slurmd
start_dead() { # every daemon that is not running, and wait until all are
    local name
    # --force: munged wants a folder that everyone may enter; this one is private on purpose
    alive munged >/dev/null ||
        munged --force --origin=127.0.0.1 --key-file="$state/munge.key" --socket="$state/munge.socket" \
            --seed-file="$state/munge.seed" --pid-file="$state/munged.pid" --log-file="$state/munged.log"
    alive slurmctld >/dev/null || slurmctld -f "$state/slurmctld.conf"
    for name in "${nodes[@]}"; do
        alive "slurmd-$name" >/dev/null || slurmd -f "$state/slurmd.conf" -N "$name"
    done
    wait_for 30 all_ready
}

all_dead() { [[ -z $(daemons) ]]; }
all_ready() { # idle or at work
    all_alive && [[ $(sinfo --noheader --Node --format=%T 2>&1 | grep -cxE 'idle|mixed|allocated|completing') -eq 2 ]]
}
no_jobs() { [[ -z $(squeue --noheader 2>&1) ]]; }

listens() { # PORT: some process does, on whatever address (0A is the state LISTEN, see man 5 proc)
    grep -qs " [0-9A-F]*:$(printf %04X "$1") [0-9A-F]*:[0-9A-F]* 0A " /proc/net/tcp /proc/net/tcp6
}

free_ports() { # the first of three neighbouring ports that nobody listens on; other users may have a cluster too
    local first port
    for first in {17817..18817..10}; do
        for port in "$first" $((first + 1)) $((first + 2)); do
            if listens "$port"; then continue 2; fi
        done
        echo "$first"
        return
    done
    fail 1 "no three free ports between 17817 and 18817"
}

write_settings() { # PORT
    # The one address that Slurm's daemons can listen on is that of the machine's name. Mostly it is one that
    # other machines do not see, 127.0.0.1 or 127.0.1.1; else the daemons listen on all addresses.
    local here listen=CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
    here=$(getent ahostsv4 "$(uname -n)" | grep -o -m 1 '^127[0-9.]*') || here=127.0.0.1 listen=
    cat >"$state/slurm.conf" <<EOF_CONF
ClusterName=workshop
SlurmctldHost=localhost($here)
SlurmctldPort=$1
# Jobs derive ports from their numbers, so clusters that share a machine must not share these.
FirstJobId=$((($1 - 17817) * 100 + 1))
SlurmUser=$user
SlurmdUser=$user
StateSaveLocation=$state/slurmctld
SlurmdSpoolDir=$state/slurmd-%n
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd-%n.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/slurmd-%n.log
MailProg=/bin/true
MpiDefault=none
# cred_expire is also how long a requeued job waits before it starts again: 120 seconds by default
AuthType=auth/munge
AuthInfo=socket=$state/munge.socket,cred_expire=10
# no cgroups, which need root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
# believe the CPUs and memory declared below, which a small laptop does not have
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1024
# look for jobs to start every 2 seconds, not every minute
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
# sbatch --wait looks every 2 seconds if its own settings forget finished jobs this soon, else after 2, 10, 42, 74...
MinJobAge=4
# the daemons' settings differ from these on purpose, see below
DebugFlags=NO_CONF_HASH
JobRequeue=1
KillWait=10
ReturnToService=2
GresTypes=gpu
TaskProlog=$state/task_prolog.sh
NodeName=${nodes[0]} NodeAddr=$here Port=$(($1 + 1)) CPUs=8 RealMemory=65536 Gres=gpu:2
NodeName=${nodes[1]} NodeAddr=$here Port=$(($1 + 2)) CPUs=8 RealMemory=65536 Gres=gpu:2
PartitionName=workshop Nodes=ALL Default=YES
EOF_CONF
    # srun must be heard on 127.0.0.1 whatever the machine's name, so only the daemons have it.
    (cat "$state/slurm.conf" && echo "$listen") >"$state/slurmd.conf"
    # How long finished jobs stay in scontrol is the controller's setting: 10 minutes.
    sed 's/^MinJobAge=.*/MinJobAge=600/' "$state/slurmd.conf" >"$state/slurmctld.conf"

    # Slurm sets up cgroups when it starts, although nothing here uses them. In a container, and for most users, that
    # fails, and slurmd ends. The older plugin does nothing before it is used.
    [[ -w /sys/fs/cgroup ]] || echo CgroupPlugin=cgroup/v1 >"$state/cgroup.conf"

    # Slurm wants a character device for each GPU; any will do, and these two are everywhere.
    cat >"$state/gres.conf" <<EOF_CONF
AutoDetect=off
Name=gpu File=/dev/null
Name=gpu File=/dev/zero
EOF_CONF

    # Slurm numbers them 0 and 1. Real GPUs of those numbers must stay out of sight, or some ranks would find one and
    # others not; no machine has a GPU 100.
    cat >"$state/task_prolog.sh" <<'EOF_PROLOG'
#!/bin/sh
if [ -z "$NULLGPU_LIBRARY" ]; then # else the job runs on null GPUs (tools/nullgpu/README.md), which exist for it
    echo "export CUDA_VISIBLE_DEVICES=$(echo "$CUDA_VISIBLE_DEVICES" | sed 's/[0-9]/10&/g')"
    echo "export WORKSHOP_FAKE_GPUS=yes" # elsewhere a job whose torch does not find its GPUs ends
fi
echo "export SLURM_CONF=${SLURM_CONF%/*}/slurm.conf" # not that of the daemon
EOF_PROLOG
    chmod +x "$state/task_prolog.sh"
}

up() {
    local command lock port
    for command in munged slurmctld slurmd sbatch; do
        command -v "$command" >/dev/null ||
            fail 2 "$command is missing; install it with: apt-get install slurmctld slurmd slurm-client munge"
    done
    [[ $state =~ ^[A-Za-z0-9/._-]+$ ]] || fail 2 "slurm.conf cannot hold this path, set WORKSHOP_SLURM_DIR: $state"
    if is_ours && [[ -n $(daemons) ]]; then # jobs may be running: what is alive goes on
        all_alive || start_dead || fail 1 "some of it does not start again, see $state/*.log; down ends it with all jobs"
        say_up
        return
    fi
    # Two clusters that start at the same moment would find the same ports free: the second one waits.
    exec {lock}</tmp # a folder can be locked too; it leaves no file behind, and holds for other users' clusters
    flock --timeout 120 "$lock" || fail 1 "another cluster has been starting for two minutes (or something locks /tmp)"
    port=$(free_ports)
    down >/dev/null # what a crash or a reboot left
    rmdir "$state" 2>/dev/null || true
    mkdir -- "$state" 2>/dev/null || fail 2 "cannot make this folder (in use?), set WORKSHOP_SLURM_DIR: $state"

    # From here on, whatever goes wrong (Ctrl-C too): say why, and take everything away again.
    trap 'tail -n 5 "$state"/*.log >&2 2>/dev/null || true; down >/dev/null; fail 1 "Slurm did not start"' EXIT
    write_settings "$port"
    head -c 128 /dev/urandom >"$state/munge.key"
    start_dead {lock}>&- # the daemons live on, and must not keep the lock
    trap - EXIT
    exec {lock}>&-
    say_up
}

say_up() { # on standard output the line to type and nothing else, so that eval "$(slurm/local_cluster.sh up)" works too
    if [[ $configured != "$SLURM_CONF" && -e $configured ]]; then
        echo "The Slurm of $configured is left alone: it stays the one in use wherever the line below is not typed." >&2
    fi
    echo "The local Slurm is up, 2 nodes with 2 fake GPUs each. Type this in each shell that is to use it:" >&2
    [[ -t 1 ]] || echo "export SLURM_CONF=$SLURM_CONF" >&2 # eval takes the one below without showing it
    echo "export SLURM_CONF=$SLURM_CONF"
}

status() {
    if ! is_ours || ! all_alive; then
        echo "The local Slurm is down."
        return 1
    fi
    sinfo --Node --format="%10N %10T %10G %4c %m"
    squeue
    echo "export SLURM_CONF=$SLURM_CONF"
}

down() {
    if is_ours; then
        if alive slurmctld >/dev/null; then
            scancel --user="$user" || true
            wait_for 60 no_jobs || true
        fi
        daemons | xargs -r kill
        wait_for 10 all_dead || daemons | xargs -r kill -9
        rm -rf -- "$state"
    fi
    echo "The local Slurm is down."
}

configured=${SLURM_CONF:-/etc/slurm/slurm.conf}
export SLURM_CONF=$state/slurm.conf # for this script's own sinfo, squeue and scancel
case $#${1-} in
    1up | 1status | 1down) "$1" ;;
    *) fail 2 "usage: slurm/local_cluster.sh up|status|down" ;;
esac
