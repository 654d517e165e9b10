# make demo   set up .venv and train two networks      make test   set up .venv and run all tests
# make help   everything else
PY ?= python3
VENV ?= .venv
ARGS ?=
JOBS ?= 2
BIN := $(VENV)/bin
RUN := $(BIN)/python
# What is imported gets compiled then; compiling everything now would take twice as long.
# Where Python may not keep what it compiled, pip has to: without it each start takes seconds.
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
NB ?= $(sort $(wildcard nbs/*.ipynb))
MPLBACKEND ?= Agg
export MPLBACKEND

.PHONY: help demo test setup export readme notebooks docs site browse lint types bench wheel clean distclean

help:
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 12

demo: $(VENV)/runtime  ## train the spirals and the handwritten digits
	$(BIN)/fucina spirals
	$(BIN)/fucina digits

test: $(VENV)/develop  ## run every test; ARGS='-k rng' or ARGS=--slow go to pytest, JOBS=0 for --pdb
	$(RUN) -m pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

setup: $(VENV)/develop  ## only set up .venv for work on the project

export: $(VENV)/develop  ## clean the notebooks and write fucina/ from them
	$(BIN)/nbdev_clean
	$(BIN)/nbdev_export
	@find fucina -name '*.nb[ci]' -delete  # numba's cache does not see a change in another file

readme: $(VENV)/develop  ## write README.md from nbs/index.ipynb
	$(RUN) tools/readme.py

notebooks: $(VENV)/develop  ## run the notebooks and keep their outputs; NB=nbs/02_rng.ipynb for one
	$(RUN) tools/execute.py $(NB)
	$(BIN)/nbdev_clean

docs: $(VENV)/docs  ## build the site in _docs without Quarto (Python 3.11 or newer)
	$(RUN) tools/docs.py _stage
	$(BIN)/smalldocs render --strict _stage
	$(RUN) tools/finish.py _stage/_docs
	rm -rf _docs && mv _stage/_docs _docs

site: $(VENV)/docs  ## build the site in _docs with Quarto
	$(RUN) tools/docs.py _stage
	quarto render _stage -M html-math-method:mathml
	rm -rf _docs && mv _stage/_docs _docs

browse: $(VENV)/browse  ## look at the site of make docs in Chromium, pictures in _docs_screens
	$(RUN) tools/browse.py _docs _docs_screens

lint: $(VENV)/lint  ## check the style of the code
	$(BIN)/ruff check

types: $(VENV)/lint  ## check the types of the package
	$(BIN)/pyright --pythonpath $(RUN)
	$(RUN) tools/typed.py

bench: $(VENV)/develop  ## run the measurements of benchmarks/ (torch joins in where it is installed)
	@for f in $(filter-out %/timing.py,$(wildcard benchmarks/*.py)); do echo "== $$f"; OMP_WAIT_POLICY=PASSIVE $(RUN) $$f || exit 1; done

wheel: $(VENV)/runtime  ## build dist/fucina-*.whl
	$(RUN) -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:  ## remove what was built and cached
	rm -rf _docs _docs_screens _stage _proc dist build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find fucina nbs tests tools benchmarks conftest.py -name __pycache__ -exec rm -rf {} +

distclean: clean  ## remove the environment too
	rm -rf $(VENV)

# The environment grows as needed; a stamp is older than a changed pyproject.toml and is made again.
$(VENV)/pip:
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'fucina needs Python 3.10 or newer; name one: make PY=python3.12 ...' >&2; exit 1; }
	@$(RUN) -c 'import pip' 2>/dev/null || $(PY) -m venv --clear $(VENV) || { rm -rf $(VENV); \
	  echo 'this Python cannot make environments (Debian and Ubuntu: apt install python3-venv)' >&2; exit 1; }
	@touch $@

$(VENV)/runtime: pyproject.toml | $(VENV)/pip
	@echo 'installing fucina and what the programs need into $(VENV)'
	@$(PIP) --editable '.[data,plot]'
	@touch $@

$(VENV)/develop: pyproject.toml | $(VENV)/pip
	@echo 'installing fucina and what its tests need into $(VENV)'
	@$(PIP) --editable '.[dev]'
	@touch $(VENV)/runtime $@

$(VENV)/docs: $(VENV)/develop
	@$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/browse: $(VENV)/develop
	@$(PIP) --editable '.[browse]'
	@touch $@

$(VENV)/lint: $(VENV)/develop
	@$(PIP) --editable '.[lint]'
	@touch $@
