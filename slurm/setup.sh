#!/bin/bash
# Sourced first by every job.slurm: the site's environment, the threads that Slurm granted; prints both.

# exit, not return: a job that starts in the wrong folder must not go on to srun.
if [[ ! -f train.py || ! -f ../slurm/site.sh ]]; then
    echo "setup.sh: $PWD is not a lesson's folder; submit from one: cd 01_single_gpu && sbatch job.slurm" >&2
    exit 2
fi
# shellcheck source=/dev/null
source ../slurm/site.sh
if ! command -v python >/dev/null; then
    echo "setup.sh: no python on $HOSTNAME; say in slurm/site.sh how to get one" >&2
    exit 2
fi

# This clone's package goes first: an environment that several clones share may hold that of another one.
PYTHONPATH=$(cd .. && pwd)${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH

export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1} # else every rank starts a thread per core of the node
if [[ -n ${SLURM_CPUS_PER_TASK-} ]]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # since Slurm 22.05 srun no longer takes this over from sbatch
fi
export PYTHONUNBUFFERED=1 # the log shows each line when it is printed, and the last ones if the job is killed

# A run that stops at SIGUSR1, shortly before the time limit, makes this file: then the job goes back into the queue.
if [[ -n ${SLURM_JOB_ID-} ]]; then
    export WORKSHOP_REQUEUE_FILE=$PWD/$SLURM_JOB_ID.requeue
    # 138 is the status of a process that USR1 ended: in the first seconds, Python has not installed its handler yet.
    trap 'status=$?; if rm "$WORKSHOP_REQUEUE_FILE" 2>/dev/null || ((status == 138)); then scontrol requeue "$SLURM_JOB_ID"; fi' EXIT
fi

echo "job ${SLURM_JOB_ID:-none}, restart ${SLURM_RESTART_COUNT:-0}, on ${SLURM_JOB_NODELIST:-$HOSTNAME}:" \
    "${SLURM_NTASKS:-1} task(s), $OMP_NUM_THREADS CPU(s) per task, ${SLURM_GPUS_ON_NODE:-0} GPU(s) per node"
echo "$(command -v python), $(python --version 2>&1)"
