#!/bin/bash
# What both recipes run while the image is built, as root, on Debian 12.
#
#   install.sh packages                Python, a C++ compiler for torch.compile, Slurm for slurm/local_cluster.sh
#   install.sh python cuda|cpu FOLDER  what FOLDER/pyproject.toml names, in the versions of FOLDER/constraints.txt
#
# Two steps, so that Docker repeats only the second one when pyproject.toml has changed. The repository itself is not
# installed: it stays outside of the image, where you edit it.
set -euo pipefail

case ${1-} in
packages)
    export DEBIAN_FRONTEND=noninteractive
    apt-get update
    apt-get install --yes --no-install-recommends \
        ca-certificates g++ git less make munge nano procps python3-dev python3-venv slurm-client slurmctld slurmd
    rm -rf /var/lib/apt/lists/*
    ;;
python)
    torch=${2:?cuda or cpu} folder=${3:?the folder of pyproject.toml}
    export PIP_NO_CACHE_DIR=1
    python3 -m venv /opt/venv
    if [[ $torch == cpu ]]; then # these wheels are much smaller, because they lack the libraries of CUDA
        mapfile -t versions < <(grep -E '^(torch|torchvision)==' "$folder/constraints.txt")
        /opt/venv/bin/pip install "${versions[@]}" --index-url https://download.pytorch.org/whl/cpu
    fi
    python3 - "$folder/pyproject.toml" "$torch" >/opt/requirements.txt <<'EOF_PYTHON'
import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
dali = project["optional-dependencies"]["dali"] if sys.argv[2] == "cuda" else []
print(*project["dependencies"], *dali, sep="\n")
EOF_PYTHON
    /opt/venv/bin/pip install --requirement /opt/requirements.txt --constraint "$folder/constraints.txt"
    for tool in nullgpu rankdoctor; do # as the repository itself, they are found by PYTHONPATH
        printf '#!/bin/sh\nexec /opt/venv/bin/python -m %s "$@"\n' "$tool" >"/opt/venv/bin/$tool"
        chmod +x "/opt/venv/bin/$tool"
    done
    ;;
*)
    echo "install.sh: packages, or python cuda|cpu FOLDER" >&2
    exit 2
    ;;
esac
