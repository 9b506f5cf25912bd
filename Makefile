# Needs make and Python 3.11, 3.12 or 3.13; all else goes into .venv. `make` alone lists the targets and these variables:
#
#   PYTHON       the Python that .venv is made from; the default is the first that will do (`make clean` before you change it)
#   TORCH_INDEX  where to take torch from. The default wheel for Linux brings gigabytes of CUDA; without a GPU write
#                make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
#   JOBS         how many tests run at once; those that share a Ray run one after another
#   ARGS         more arguments for the command, for example make test ARGS="tests/unit/data/test_order.py -x"

PYTHON      ?=
TORCH_INDEX ?=
JOBS        ?= 2
ARGS        ?=
RUN         := .venv/bin/python -m

# Ray and the endpoint talk to themselves over loopback, which must never go through a proxy.
export no_proxy := $(or $(no_proxy),$(NO_PROXY),::1),127.0.0.1,localhost
export NO_PROXY := $(no_proxy)
export PYTHON TORCH_INDEX

.PHONY: help demo test test-slow check format clean preflight install

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1: /p; s/^#   /  /p' Makefile

demo: install  ## run the main job, from data to answers over HTTP
	$(RUN) rtrain demo $(ARGS)

test: install  ## run every test but the slow ones; a test that is skipped has failed
	$(RUN) pytest -m "not slow" -n $(JOBS) --dist loadscope $(ARGS)

test-slow: install  ## run the slow tests
	$(RUN) pytest -m slow $(ARGS)

check: install  ## lint, formatting, types, and who may import whom
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy
	.venv/bin/lint-imports
	$(RUN) pytest -q tests/unit/project/test_imports.py

format: install  ## format, and fix what ruff can fix
	$(RUN) ruff check --fix
	$(RUN) ruff format

clean:  ## remove .venv and the caches; runs/ stays
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

preflight: export SCRIPT = $(PREFLIGHT)  ## say what this machine lacks; nothing is installed
install: export SCRIPT = $(INSTALL)  ## install into .venv, unless that was done and nothing has changed since
preflight install:
	@sh -euc "$$SCRIPT"

define PREFLIGHT
say() { printf 'make: %s\n' "$$1" >&2; shift; for line; do printf '      %s\n' "$$line" >&2; done; }
no_venv() {
  say "$$1 cannot create virtual environments: its venv or ensurepip module is missing or broken." \
    "Debian, Ubuntu: sudo apt install python3-venv (python3.12-venv for python3.12, and so on)" \
    "Elsewhere: install a complete Python 3.11 to 3.13 and name it: make ... PYTHON=/path/to/python3"; exit 1; }
set -- python3.11 python3.12 python3.13 python3 python
if .venv/bin/python -m pip --version >/dev/null 2>&1; then set -- .venv/bin/python; fi
if [ -n "$$PYTHON" ]; then set -- "$$PYTHON"; fi
python= other= broken=
for name; do
  version=$$("$$name" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
  case $$version in 3.11|3.12|3.13) ;; *) other="$$other $$name is $$version;"; continue ;; esac
  if "$$name" -c 'import ensurepip, venv' 2>/dev/null; then python=$$name; break; else broken=$${broken:-$$name}; fi
done
if [ -z "$$python$$broken" ]; then
  say "no supported Python. rtrain needs 3.11, 3.12 or 3.13; tried $$*:$${other:- none of them runs.}" \
    "Debian, Ubuntu: sudo apt install python3.12 python3.12-venv (or 3.11, 3.13: what your release has)" \
    "macOS: brew install python@3.12. One that is elsewhere: make ... PYTHON=/path/to/python3"; exit 1
fi
if [ -z "$$python" ]; then no_venv "$$broken"; fi
# .venv may be a link to a folder on a larger disk. venv refuses a link, so it is told of the folder.
venv=$$(cd -P .venv 2>/dev/null && pwd || true)
endef

define INSTALL
wanted=$$({ pwd; cat pyproject.toml constraints.txt; } | cksum)
if [ -x .venv/bin/python ] && [ "$$(cat .venv/installed 2>/dev/null)" = "$$wanted" ]; then exit 0; fi
$(PREFLIGHT)
rm -f .venv/installed
.venv/bin/python -m pip --version >/dev/null 2>&1 || "$$python" -m venv --clear "$${venv:-.venv}" || no_venv "$$python"
echo "make: installing into .venv with $$(.venv/bin/python -V); the first time takes some minutes" >&2
pip() { .venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt "$$@"; }
{ [ -z "$$TORCH_INDEX" ] || pip --no-deps --index-url "$$TORCH_INDEX" torch; } && pip -e '.[train,demo,test]' || {
  say "the installation failed; pip says why, above. If it is" \
    "the network: is the package index reachable? A proxy goes into HTTPS_PROXY, an index of your own into PIP_INDEX_URL." \
    "torch: the small CPU wheel for Linux comes with TORCH_INDEX=https://download.pytorch.org/whl/cpu (now: '$$TORCH_INDEX')." \
    "the platform: torch and Ray have wheels for Linux (glibc, x86_64 or arm64) and for macOS on Apple silicon." \
    "The same command goes on from where it stopped."; exit 1; }
echo "$$wanted" > .venv/installed
endef
