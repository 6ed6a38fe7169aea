# Everything runs in .venv, made from nothing by the first target that needs it. Its path is relative, as make cannot
# hold one with spaces.
PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/installed
TESTED := $(VENV)/tested
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: setup demo test test-slow test-all test-fixes test-rehearsal test-oldest test-gpu test-faults preflight lint docs \
	site clean

setup: $(INSTALLED)

# the workshop, and the tools that are projects of their own
PROJECTS := $(wildcard pyproject.toml tools/*/pyproject.toml)

# TORCH=cpu, cuda, pypi or oldest chooses the PyTorch: see install.py
$(INSTALLED): install.py $(PROJECTS) constraints.txt
	"$(PYTHON)" install.py --folder $(VENV)
	touch $@

$(TESTED): install.py $(PROJECTS) constraints.txt
	"$(PYTHON)" install.py --folder $(VENV) --extras dev
	touch $@ $(INSTALLED)

demo: setup
	python data/prepare.py mnist --synthetic
	cd 01_single_gpu && python -m kernprof -l -o demo.lprof train.py --limit_train 16000 --run_dir ../runs/demo
	cd 01_single_gpu && python -m line_profiler -mt demo.lprof
	@python -c "import json; epoch = json.load(open('runs/demo/summary.json'))['epochs'][-1]; \
		print('Accuracy on the validation digits: {:.2%}. Now read 01_single_gpu/README.md'.format(epoch['val_accuracy']))"

# the installation, the lessons, their loaders, models and flags, and both tools: three minutes on two idle cores
PYTEST := python -m pytest -n 3 --dist worksteal
test: $(TESTED)
	@python tests/installation.py
	$(PYTEST) -m 'not thorough and not slow'
	cd tools/nullgpu && $(PYTEST) -m 'not thorough and not slow'
	cd tools/rankdoctor && $(PYTEST) -m 'not thorough and not slow'

# what `make test` leaves out because it takes long: the commands of the first pages, runs that are stopped and killed,
# jobs on a Slurm of its own, one exercise of each lesson
test-slow: $(TESTED)
	$(PYTEST) -m 'slow and not thorough'
	cd tools/nullgpu && $(PYTEST) -m 'slow and not thorough'
	cd tools/rankdoctor && $(PYTEST) -m 'slow and not thorough'

# all of that, the commands of all pages, the experiments, and what takes long in the tools
test-all: $(TESTED)
	@python tests/installation.py
	$(PYTEST) -m 'not fixes and not rehearsal'
	cd tools/nullgpu && $(PYTEST)
	cd tools/rankdoctor && $(PYTEST)

# the graders of the exercises: the fault, the solution, and every right and wrong fix that they must tell apart; after a
# change of an exercise, or of a train script
test-fixes: $(TESTED)
	$(PYTEST) -m fixes

# what needs a GPU, and the lessons, on GPUs that compute nothing: before a real one is there
test-rehearsal: $(TESTED)
	$(PYTEST) -m rehearsal

# the same as `make test` with the oldest PyTorch that is supported, in an environment of its own
test-oldest:
	$(MAKE) --no-print-directory test VENV=.oldest TORCH=oldest

# runs that are killed at random moments, with kill -9 and signals, also while they save: each must resume
SEED ?= 1
RUNS ?= 20
test-faults: $(TESTED)
	python tests/faults/killed_often.py --seed $(SEED) --runs $(RUNS)

# on a GPU: with .venv if it is there, else with any python that has torch and pytest, because a node with a GPU often
# has an environment with torch, but no network to install one
GPU_PYTHON = $(if $(wildcard $(TESTED)),$(VENV)/bin/python,$(PYTHON))
test-gpu:
	@"$(GPU_PYTHON)" -c "import pytest, torch" || { echo "error: make test-gpu needs a python with torch and pytest: \
	run make test first, or name one with make test-gpu PYTHON=..." >&2; exit 2; }
	PYTHONPATH="$(CURDIR):$$PYTHONPATH" "$(GPU_PYTHON)" -m pytest tests/gpu

preflight: setup
	python slurm/preflight.py

# ruff, shellcheck, codespell and mypy, each in a small environment of its own: neither PyTorch nor .venv is needed
lint: .lint/installed
	.lint/bin/pre-commit run --all-files --show-diff-on-failure

.lint/installed:
	"$(PYTHON)" -m venv .lint
	.lint/bin/python -m pip install --quiet pre-commit
	touch $@

docs: $(TESTED)
	python -m lab.pages
	python -m lab.ladder_picture

# the pages as a searchable web site: open build/site/html/index.html; neither PyTorch nor .venv is needed
site: .site/installed
	.site/bin/python lab/site.py

.site/installed:
	"$(PYTHON)" -m venv .site
	.site/bin/python -m pip install --quiet zensical==0.0.70
	touch $@

# what setup, demo, lint and site made, and nothing else
clean:
	rm -rf .venv .oldest .lint .site build/site multi_gpu_training_workshop.egg-info runs/demo 01_single_gpu/demo.lprof
	rm -rf tools/nullgpu/src/nullgpu.egg-info tools/rankdoctor/src/rankdoctor.egg-info
