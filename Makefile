# Everything sets up its own virtual environment in .venv; python3, pip and make are all that is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-torch check golden fuzz docs accuracy bench clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: $(VENV)/.installed  ## replay the example trace that comes with the package
	$(BIN)/lumos demo

test: $(VENV)/.dev  ## linters, types and all tests; says how long it took, and why tests were skipped
	@began=$$(date +%s); $(BIN)/ruff check . && $(BIN)/mypy && $(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder; code=$$?; \
	took=$$(($$(date +%s) - began)); echo "make test: $$((took / 60)) min $$((took % 60)) s"; exit $$code

ROWS ?=
test-torch: $(VENV)/.dev  ## dry runs with other builds of torch, an environment each; ROWS=2.11.0:cuda:3.12 chooses
	$(BIN)/python tests/torch_builds.py $(ROWS)

check: $(VENV)/.dev  ## linters and types alone
	$(BIN)/ruff check .
	$(BIN)/mypy

golden: $(VENV)/.dev  ## list every value that a change moved, of some hundred commands
	$(BIN)/python tests/golden.py

SECONDS ?= 3600
SEED ?= 0
fuzz: $(VENV)/.dev  ## hostile input to every command for an hour, and a table; SECONDS and SEED choose how long and which
	$(BIN)/python tests/fuzz.py --seconds $(SECONDS) --seed $(SEED)

docs: $(VENV)/.dev  ## the documentation as a site in out/docs
	$(BIN)/python docs/api_page.py
	$(BIN)/python docs/build.py out/docs

accuracy: $(VENV)/.dev  ## measure the accuracy on the shared measurements and write the pages in docs/
	$(BIN)/python benchmarks/accuracy.py -o docs/accuracy.md
	$(BIN)/python benchmarks/forecasts.py -o docs/forecasts.md
	$(BIN)/python benchmarks/dry_runs.py -o docs/dry_runs.md
	$(BIN)/python benchmarks/changes.py -o docs/changes.md
	$(BIN)/python benchmarks/searches.py -o docs/searches.md
	$(BIN)/python benchmarks/energy.py -o docs/energy.md
	$(BIN)/python benchmarks/transfer.py -o docs/transfer.md
	$(BIN)/python benchmarks/networks.py -o docs/networks.md
	$(BIN)/python benchmarks/astra_sim.py -o docs/astra_sim.md
	$(BIN)/python benchmarks/contention.py -o docs/contention.md
	$(BIN)/python benchmarks/experts.py -o docs/experts.md
	$(BIN)/python benchmarks/distributions.py -o docs/distributions.md
	$(BIN)/python benchmarks/goodput.py -o docs/goodput.md
	$(BIN)/python benchmarks/risk_speed.py -o docs/risk.md
	$(BIN)/python benchmarks/stragglers.py -o docs/stragglers.md
	$(BIN)/python benchmarks/files.py -o docs/files.md
	$(BIN)/python benchmarks/sensitivities.py -o docs/sensitivities.md
	$(BIN)/python benchmarks/synthesis.py -o docs/synthesis.md

bench: $(VENV)/.dev  ## measure the speed beside HolisticTraceAnalysis
	$(BIN)/python benchmarks/predict_speed.py docs/forecast_speed.md
	$(BIN)/python benchmarks/search_speed.py docs/search_speed.md
	$(BIN)/python benchmarks/report_speed.py docs/report_speed.md
	$(BIN)/python benchmarks/constructors.py --models 600
	$(BIN)/python benchmarks/replay_speed.py --out docs/speed.md

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
