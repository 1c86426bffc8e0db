# Every target but help sets the environment up first: minutes on a fresh machine, a fraction of a second after that.
# PYTHON makes the environment; CP_PYTHON and COMFYUI_PATH replace it by an existing interpreter and ComfyUI.

PYTHON ?= python3

SETUP = assignments=$$("$(PYTHON)" .ci/setup.py --print) && eval "$$assignments" && export CP_PYTHON COMFYUI_PATH

# `python -m pytest` would put the checkout on sys.path, where the folder nodes/ hides ComfyUI's nodes.py.
PYTEST = "$$CP_PYTHON" -c 'import sys; sys.path[:] = filter(None, sys.path); import pytest; sys.exit(pytest.main())'

.PHONY: help setup test test-quick demo play train-demo pictures bench gpu-check soak machines windows packs coverage registry definitions lint lint-ruff lint-format lint-mypy lint-codespell

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 - \2/p' Makefile

setup: ## make the development environment outside the checkout, or find it ready
	@"$(PYTHON)" .ci/setup.py

test: ## run the tests; a part of them with PYTEST_ARGS, options for pytest, e.g. PYTEST_ARGS="tests/unit -k mask"
	@$(SETUP) && $(if $(strip $(PYTEST_ARGS)),$(PYTEST) $(PYTEST_ARGS),"$$CP_PYTHON" .ci/lanes.py)

test-quick: ## lint, the tests that need no ComfyUI, and one prompt per mode on a server: a minute or so
	@$(SETUP) && "$$CP_PYTHON" .ci/lanes.py --quick

demo: ## run the main job: the same picture from one rank and from several
	@$(SETUP) && "$$CP_PYTHON" benchmarks/demo.py $(DEMO_ARGS)

play: ## start ComfyUI with this pack and a small model that draws digits, to click around in
	@$(SETUP) && "$$CP_PYTHON" .ci/play.py

train-demo: ## train the model that draws digits anew, from nothing (46 minutes on two idle cores without instructions for bfloat16; TRAIN_ARGS="--steps 2400")
	@$(SETUP) && "$$CP_PYTHON" benchmarks/digits/train.py $(TRAIN_ARGS)

pictures: ## take every picture of documents, help and templates anew, and the README's clip (10 minutes on two idle cores)
	@$(SETUP) && CP_SCREENSHOTS=1 $(PYTEST) tests/browser && for part in cards graphs clip; do "$$CP_PYTHON" .ci/pictures/$$part.py || exit; done

bench: ## run every benchmark and say which ratios moved since they were recorded (three quarters of an hour; BENCH_ARGS=--quick for less, --record to keep them)
	@$(SETUP) && "$$CP_PYTHON" benchmarks/recorded.py $(BENCH_ARGS)

gpu-check: ## check this machine's GPU, docs/gpu.md; GPU_CHECK_ARGS="--out results --sections first" for a part of nine minutes, or --rehearse without one
	@$(SETUP) && "$$CP_PYTHON" benchmarks/gpu_check.py $(GPU_CHECK_ARGS)

soak: ## faults at full length and several times, into docs/generated/reliability.md (an hour or two; SOAK_ARGS="--runs 1")
	@$(SETUP) && "$$CP_PYTHON" .ci/soak.py $(SOAK_ARGS)

machines: ## two computers, as two network namespaces: parity, faults, times and bytes, into docs/generated/machines.md (as root, minutes)
	@$(SETUP) && "$$CP_PYTHON" .ci/machines.py $(MACHINES_ARGS)

windows: ## ComfyUI and ranks with Windows' Python under Wine, on Debian 12 (a quarter of an hour; WINDOWS_ARGS="-k gloo" for a part of tests/windows, or "-- program.py")
	@$(SETUP) && "$$CP_PYTHON" .ci/windows.py $(WINDOWS_ARGS) $(if $(strip $(WINDOWS_ARGS)),,&& CP_TEST_WINE=1 $(PYTEST) -v tests/wine)

packs: ## try the nodes of node packs on ranks against the stock graph: a table (PACKS_ARGS="folder ..." of packs; minutes per node)
	@$(SETUP) && "$$CP_PYTHON" .ci/packs.py $(PACKS_ARGS)

coverage: ## which of ComfyUI's templates run, into docs/generated/coverage.md; COVERAGE_ARGS="--report FILE" reuses what the tests wrote
	@$(SETUP) && "$$CP_PYTHON" .ci/coverage $(COVERAGE_ARGS)

registry: ## write docs/generated/families.md and diffusers.md from the plan tables and their tests
	@$(SETUP) && "$$CP_PYTHON" .ci/registry.py

definitions: ## store what saved workflows need of the nodes, for a release
	@$(SETUP) && "$$CP_PYTHON" .ci/definitions.py

lint: lint-ruff lint-format lint-mypy lint-codespell ## run every check that needs no test; -k to see all failures

lint-ruff:
	@$(SETUP) && "$$CP_PYTHON" -m ruff check .

lint-format:
	@$(SETUP) && "$$CP_PYTHON" -m ruff format --check .

# The pack's own name is that of the folder it was cloned into, which may be no name in Python, and `nodes` beside it would be taken
# for ComfyUI's module: mypy sees both through a link with a name of its own. What it found out about torch stays in the cache.
lint-mypy:
	@$(SETUP) && link=$$(mktemp -d)/context_parallel && ln -s "$(CURDIR)" "$$link" && MYPYPATH="$$(dirname "$$link")" \
		"$$CP_PYTHON" -m mypy --cache-dir "$${CP_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/comfyui-context-parallel}/mypy" \
		cp_runtime .ci tests/support "$$link/nodes" "$$link/__init__.py" && "$$CP_PYTHON" -m mypy --cache-dir=/dev/null \
		--platform win32 --follow-imports=silent cp_runtime/system/windows.py; status=$$?; rm -r "$$(dirname "$$link")"; exit $$status

lint-codespell:
	@$(SETUP) && "$$CP_PYTHON" -m codespell_lib
