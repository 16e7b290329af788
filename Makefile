# make demo: train on a synthetic scene over 4 ranks and write its map.
# make test: tests of one process and over 2 ranks.   make rest: over 3, 4 and 6, and make jobs beside.
# make jobs: job scripts, hanging ranks, and a job on a Slurm of virtual nodes (root, Debian).
# make nightly: all else of that Slurm, of two jobs and of ranges of nodes; make fuzz; KILLS (60) at random.
# make fuzz: spoilt files, networks of a grammar, runs; EXAMPLES of each, with a SEED that is printed.
# make bench: all benches, or those of BENCH="balance pipeline", and bench/README.md from what they say.
# make soak: KILLS at random under mpiexec and Slurm, with a SEED; an hour or so for 200.
# make docs: the documentation as a site, in build/site.
# make check: ruff, mypy, the import contracts, shellcheck, words.
PYTHON ?= python3
BIN := .venv/bin
SIZE ?= 2048
EXAMPLES ?= 500
BANNED := rims?|whoever|anew|for ever|likewise|beside|stands there|somebody|nobody|strangers?
SEED := $(or $(SEED),$(shell date +%s))

.PHONY: install demo test rest jobs nightly fuzz bench soak docs check clean
install: .venv/installed

.venv/installed: setup.py constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mpich,test]'
	touch $@

demo: install
	PATH="$(CURDIR)/$(BIN):$$PATH" SIZE=$(SIZE) demo/demo.sh

test: install
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/run.sh test

rest: install
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/run.sh rest

jobs: install
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/run.sh jobs

nightly: KILLS ?= 60
nightly: install fuzz
	@echo "seed $(SEED): make nightly SEED=$(SEED) EXAMPLES=$(EXAMPLES) KILLS=$(KILLS) repeats this"
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/run.sh nightly
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m bench soak --kills $(KILLS) --seed $(SEED) \
	    --output /dev/null

fuzz: install
	@echo "seed $(SEED): make fuzz SEED=$(SEED) EXAMPLES=$(EXAMPLES) repeats this"
	FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -q tests/fuzz --hypothesis-profile=fuzz \
	    --hypothesis-seed=$(SEED) --hypothesis-show-statistics
	GENERATED_MODULES=$(EXAMPLES) GENERATED_FROM=$(SEED) $(BIN)/python -m pytest -q \
	    tests/adoption/test_generated.py
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH=tests/exactness:tests/adoption OMP_NUM_THREADS=1 \
	    MPIR_CVAR_ENABLE_HEAVY_YIELD=1 mpiexec -n 4 python -m mpi4py \
	    tests/exactness/random_runs.py --from $(SEED) --count $(EXAMPLES)

bench: install
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m bench $(or $(BENCH),--all)

soak: KILLS ?= 200
soak: install
	@echo "seed $(SEED): make soak SEED=$(SEED) KILLS=$(KILLS) chooses the same again"
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m bench soak --kills $(KILLS) --seed $(SEED)

docs: install
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html; to read it: $(BIN)/mkdocs serve"

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports
	git ls-files '*.sh' '.ci/run' 'jobs/*' | xargs grep -lE '^#!.*(ba)?sh' | xargs $(BIN)/shellcheck
	! git grep -nwiE '$(BANNED)' -- tilenet launch docs README.md CONTRIBUTING.md

clean:
	rm -rf .venv demo/out build dist *.egg-info
