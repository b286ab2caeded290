PYTHON ?= python3
VENV := .venv

# Keeps the checkout's own folders (kernels/, core/) from shadowing packages of the same name.
export PYTHONSAFEPATH := 1
export PYTHON VENV

PACKAGE_FOLDERS := $(shell find core kernels adapters cli -type d -not -name __pycache__)

.PHONY: demo test lint clean

demo: $(VENV)/.linked
	$(VENV)/bin/replayssm demo

test: $(VENV)/.linked
	ci/test.sh

lint: $(VENV)/.linked
	ci/lint.sh

clean:
	rm -rf $(VENV) build dist *.egg-info .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.installed: pyproject.toml ci/constraints.txt ci/setup_venv.sh
	ci/setup_venv.sh $(VENV)
	touch $@

# A strict editable install links each file that existed when it was made, so it is made again
# when a folder has gained or lost one.
$(VENV)/.linked: $(VENV)/.installed $(PACKAGE_FOLDERS)
	$(VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps \
		--no-build-isolation --config-settings editable_mode=strict -e .
	touch $@
