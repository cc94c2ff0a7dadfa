# make train, make test: everything a fresh machine needs, then the thing itself. A second call installs nothing.
#   PYTHON=python3.12   which Python makes .venv (3.10 or newer)      ARGS="..."   handed on to train, test, chaos and bench
#   KILLS=100   of chaos        SEED=7   its plan, as it was printed by the run to be seen again
#   make test ARGS="-n 0 --pdb"   the tests one after the other, in one process

PYTHON ?= python3
ARGS ?=
KILLS ?= 1000
SEED ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STARTED := $(VENV)/.installing
LOG := $(VENV)/install.log
PIP = $(BIN)/python -m pip install --no-input --disable-pip-version-check -c constraints.txt
# Two files at a time, in the order of their names: those of many ranks first, the many short ones last.
SIDE_BY_SIDE = --numprocesses 2 --dist loadfile --no-loadscope-reorder
unexport PYTHONDONTWRITEBYTECODE # the tests start hundreds of processes: each would compile the library anew
TORCH := $(shell sed -n 's/^torch==/&/p' constraints.txt)

# Scripts and the editable install hold absolute paths: a .venv that was moved or copied with its folder is installed again.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
$(shell rm -f $(STAMP))
endif

.DEFAULT_GOAL := help
.PHONY: help install train test chaos check format bench

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
	while IFS='|' read -r target text; do printf '%-16s%s\n' "$$target" "$$text"; done

install: $(STAMP) ## create .venv with the tested versions (train, test, check and bench do it by themselves)
	@:

train: $(STAMP) ## train a small GPT-2 with two processes on this Python's own library
	@$(BIN)/lockstep train $(ARGS)

test: $(STAMP) ## the test suite; ARGS=--slow for all of it
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

chaos: $(STAMP) ## kill a training run KILLS times at random moments; it must end in the same bits
	@$(BIN)/python tests/chaos.py --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(ARGS)

# The last of them: every name in tests/slow_tests.txt is that of a test.
check: $(STAMP) ## format, lint, types, layers, sizes
	@$(BIN)/ruff format --check --quiet . || { echo 'make: not formatted, see above: make format' >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/pyright & types=$$!; $(BIN)/lint-imports --no-logo --no-cache && \
	$(BIN)/python -m pytest --quiet tests/unit/test_tidy.py && \
	$(BIN)/python -m pytest --collect-only >/dev/null; others=$$?; wait $$types && exit $$others

format: $(STAMP) ## write the house format and sort imports
	@$(BIN)/ruff check --quiet --fix-only . && $(BIN)/ruff format --quiet .

bench: $(STAMP) ## measure against torch in the same run; results go into benchmarks/results
	@for bench in benchmarks/bench_*.py; do $(BIN)/python $$bench --record $(ARGS) || exit 1; done

# One line for each thing that can be missing. STARTED marks an install that did not end: the next one begins anew.
# A .venv that someone else made is kept and completed.
$(STAMP): pyproject.toml constraints.txt hatch_build.py $(wildcard src/lockstep/observe/native/*.[ch])
	@rm -f $@
	@say() { echo "make: $$*" >&2; exit 1; }; \
	if [ -e $(STARTED) ] || ! $(BIN)/python -c '' >/dev/null 2>&1; then \
	    command -v $(PYTHON) >/dev/null || \
	        say "$(PYTHON) is not on PATH: install Python 3.10 or newer, or name yours: make PYTHON=python3.12"; \
	    version=$$($(PYTHON) -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) || \
	        say "$(PYTHON) does not start: name a Python 3.10 or newer: make PYTHON=python3.12"; \
	    $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	        say "$(PYTHON) is Python $$version, too old: name 3.10 or newer: make PYTHON=python3.12"; \
	    echo "creating $(VENV) with Python $$version"; \
	    rm -rf $(VENV) && mkdir $(VENV) && touch $(STARTED) || say "cannot write here: $(CURDIR)"; \
	    $(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || \
	        say "this Python cannot make environments: install its venv module (Debian: apt-get install python3-venv)"; \
	fi; \
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null 2>&1 || \
	    say "$(VENV) has no pip and this Python cannot make one: install ensurepip (Debian: apt-get install python3-venv)"
	@touch $(STARTED)
	@echo 'installing $(TORCH), then lockstep and its tools (a few minutes the first time; log: $(LOG))'
	@{ $(PIP) $(TORCH) hatchling editables && $(PIP) --no-build-isolation -e '.[dev]'; } >$(LOG) 2>&1 || { \
	    lacking=$$(sed -n 's/^ERROR: No matching distribution found for //p; s/^ERROR: Cannot install \(.*\) because.*/\1/p' $(LOG)); \
	    if grep -qE 'NewConnectionError|[Cc]onnection (broken|refused|to )|resol(ve|ution)( host| of|:|.*Errno)|Temporary failure|ProxyError|SSLError|[Tt]imed out' $(LOG); \
	    then cause="the package index cannot be reached: check the network, the proxy, and 'pip config list'"; \
	    elif [ -n "$$lacking" ]; \
	    then cause="no package index offers $$lacking for this Python and platform: see 'pip config list' and PIP_ variables"; \
	    else cause=$$(grep '^ERROR: ' $(LOG) | tail -n 1); fi; \
	    echo "make: $${cause:-pip failed}; all of it is in $(LOG)" >&2; exit 1; }
	@rm -f $(STARTED)
	@echo '$(CURDIR)' >$@
	@echo 'installed'
