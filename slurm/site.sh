#!/bin/bash
# The one file a site edits. Source it once per login, in bash or zsh, before sbatch:    source slurm/site.sh
# Every job sources it again on its node.

# Whichever environment you choose below, python imports the package `workshop` of this clone, not that of another one.
clone=$(CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]:-$0}")/.." && pwd) # zsh has no BASH_SOURCE and keeps the name in $0
export PYTHONPATH=$clone${PYTHONPATH:+:$PYTHONPATH}

# 1. What sbatch needs to know here. It reads each option from a variable of the shell it is typed in, and such a
#    variable wins over the #SBATCH line of a job file. (salloc reads SALLOC_*, and srun outside a job SLURM_*.)
#
# export SBATCH_ACCOUNT=my_project
# export SBATCH_PARTITION=gpu
# export SBATCH_QOS=short
# export SBATCH_RESERVATION=workshop
# export SBATCH_CONSTRAINT=a100

# 2. Where Python is. Keep one of the four. The nodes' driver must suit its PyTorch: see docs/installing.md.
#
# (a) Modules and a conda environment called workshop. conda activate is a function of interactive shells, which a job
#     is not, so conda.sh has to define it first.
#
# module purge                # not where Slurm itself is a module: it would take sbatch and srun away
# module load anaconda3
# source "$(conda info --base)/etc/profile.d/conda.sh"
# conda activate workshop
#
# (b) Modules and a virtual environment: first the modules that it was made with, then the environment. If a job says
#     "module: command not found", source what defines it first: often /etc/profile.d/modules.sh or lmod.sh.
#
# module load python/3.11
# source ~/envs/workshop/bin/activate
#
# (c) In an image of Apptainer: see docs/container.md. python, kernprof and torchrun then start inside of it.
#
# export WORKSHOP_IMAGE=$HOME/workshop.sif
# export PATH=$clone/docs/container/bin:$PATH
#
# (d) As shipped: the .venv that make puts beside this folder. Without one, the python found first is taken as right.
if [ -f "$clone/.venv/bin/activate" ]; then
    # shellcheck source=/dev/null
    source "$clone/.venv/bin/activate"
fi

# 3. Data and runs outside of this clone, such as on a scratch file system: a home folder may be too small for them.
#    For a class (docs/instructors/class_folder.md), data for all, and runs that the instructor can read:
#
# export WORKSHOP_DATA=/shared/class/data
# export WORKSHOP_RUNS=/shared/runs/$USER
# umask 027

unset clone
