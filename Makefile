# Everything runs in .venv, made from nothing by the first target that needs it.
PYTHON ?= python3
VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
export PATH := $(BIN):$(PATH)

.PHONY: setup demo test lint docs clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@echo "Installing into .venv: some gigabytes, a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]' --constraint constraints.txt
	touch $@

demo: setup
	python data/prepare.py mnist --synthetic
	cd 01_single_gpu && kernprof -l -o demo.lprof train.py --limit_train 16000 --run_dir ../runs/demo
	cd 01_single_gpu && python -m line_profiler -mt demo.lprof
	@python -c "import json; epoch = json.load(open('runs/demo/summary.json'))['epochs'][-1]; \
		print('Accuracy on the validation digits: {:.2%}. Now read 01_single_gpu/README.md'.format(epoch['val_accuracy']))"

test: setup
	python -m pytest -n 2 --dist worksteal

lint: setup
	ruff check .
	ruff format --check .
	shellcheck slurm/*.sh */*.slurm .ci/run

docs: setup
	python -m cogapp -r -I results -I 03_ddp/experiments README.md */README.md */experiments/README.md

clean:
	rm -rf $(VENV) runs *.egg-info */*.lprof */*.log
