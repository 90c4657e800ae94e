# The commands of everyday work.
# The environment for CPUs, or with DEVICE=gpu a separate one for GPUs.
DEVICE ?= $(if $(filter gpu,$(MAKECMDGOALS)),gpu,cpu)
VENV ?= $(if $(filter cpu,$(DEVICE)),.venv,.venv-$(DEVICE))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Let Python keep compiled tests: otherwise each pytest process needs five more seconds to rewrite their assertions.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart install agents test-setup test test-fast nightly parity faults cluster lint format bench against-trl gpu lock docs clean

quickstart: install
	$(BIN)/asyncrl train specs/quickstart.yaml

install: $(STAMP)

$(STAMP): requirements/$(DEVICE).lock requirements/install.sh pyproject.toml
	bash requirements/install.sh $(VENV) $(DEVICE)
	touch $@

# Other people's agents, for tests that train them unchanged. Prints the agents that cannot be installed.
AGENTS ?= .agents
agents: install
	bash requirements/agents.sh $(BIN)/python $(AGENTS)

# Programs that tests need outside the environment. Tests skip if one cannot be installed.
test-setup: install
	bash requirements/sandboxes.sh chromium podman runc busybox-static
	bash requirements/agents.sh $(BIN)/python $(AGENTS) mini-swe-agent codex claude-code openenv || true

# A file's tests share a process, because their fixtures take seconds to start. tests/conftest.py says which files come
# first. Three processes run on two cores, because tests of hosts and commands wait a third of their time; real runs do
# not wait, so two processes run them.
PROCESSES ?= $(shell echo $$(( $$(nproc) * 3 / 2 )))
# Both parts run, so that one failure does not hide another.
test: test-setup
	status=0; \
	$(BIN)/python -m pytest --rotate --ignore tests/e2e -n $(PROCESSES) --dist loadfile --no-loadscope-reorder || status=$$?; \
	$(BIN)/python -m pytest --rotate tests/e2e -n 2 --dist loadfile --no-loadscope-reorder || status=$$?; \
	exit $$status

# Pure logic and small real parts.
test-fast: install
	$(BIN)/python -m pytest -m "not slow and not stack and not nightly" -n logical --dist loadfile --no-loadscope-reorder

# Takes hours: rare combinations, the fault campaign, agent libraries in bulk, the spec fuzzer.
nightly: test-setup faults
	$(BIN)/python -m pytest -m "nightly or rotating"
	$(BIN)/python -m tests.e2e.gateway.campaign --sessions 500
	$(BIN)/python -m tests.e2e.gateway.campaign --sessions 200 --agents all
	$(BIN)/python -m tests.spec.fuzz

# Compares the mathematics with TRL's and verl's, in a separate environment that also has their packages.
parity: install $(VENV)-parity/.installed
	$(VENV)-parity/bin/python -m pytest tests/parity

$(VENV)-parity/.installed: requirements/parity.txt requirements/parity.sh $(STAMP)
	bash requirements/parity.sh $(VENV) $(VENV)-parity
	touch $@

# Kills, stops and disturbs parts of real runs, 120 times and more (hours on two cores).
faults: install
	$(BIN)/python -m tests.e2e.faults.campaign --kills 120 --seed 0

# Several hosts, made of namespaces on this machine (needs root), and a campaign that kills, cuts off, slows and adds hosts.
cluster: install
	$(BIN)/python -m pytest tests/cluster -m ""
	$(BIN)/python -m tests.cluster.campaign --events 30 --seed 0

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.prose

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python benchmarks/async_vs_sync.py

# Samples per second compared with TRL's trainer: on CPUs the quickstart and a larger model, with DEVICE=gpu 0.4B.
STEPS ?= 20
against-trl: install $(VENV)-parity/.installed
	PYTHONPATH=. $(VENV)-parity/bin/python benchmarks/against_trl.py --device $(DEVICE:gpu=cuda) --asyncrl $(BIN)/asyncrl --steps $(STEPS) $(if $(SIZES),--sizes $(SIZES))

# Tests every part of asyncrl on this machine's GPUs, in about half an hour, and writes gpu-report/.../report.md to send.
# DEVICE=cpu runs smaller versions, in ten minutes on two cores. MODEL=FOLDER also measures a saved model,
# and no part begins after MINUTES=30.
gpu: install
	PYTHONPATH=benchmarks $(BIN)/python -m gpu_report --device $(DEVICE:gpu=cuda) --out gpu-report/$(shell date +%Y%m%d-%H%M%S) $(if $(MODEL),--model $(MODEL)) $(if $(MINUTES),--minutes $(MINUTES))

docs: install
	$(BIN)/python -m asyncrl_cli.spec.reference > docs/spec.md
	$(BIN)/python -m asyncrl_cli.spec.schema > specs/spec.schema.json

# Needs uv. Pass INDEX="--find-links DIR" if torch's CPU build is somewhere else. One file serves all versions of Python.
# Existing pins stay where possible; UPGRADE=--upgrade takes the newest versions.
INDEX ?= --extra-index-url https://download.pytorch.org/whl/cpu
COMPILE = uv pip compile --universal --python-version 3.11 --index-strategy unsafe-best-match --no-annotate --no-header \
  --quiet $(UPGRADE)
lock:
	$(COMPILE) requirements/cpu.in --override requirements/overrides.txt $(INDEX) -o requirements/cpu.lock
	$(COMPILE) requirements/gpu.in -o requirements/gpu.lock

clean:
	rm -rf $(VENV) $(VENV)-parity .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find asyncrl_cli tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
