# `make demo` and `make test` set up everything they need in .venv (see scripts/bootstrap.sh).
PY := .venv/bin/python
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test lint setup clean
setup:
	@scripts/bootstrap.sh
demo: setup            ## RL of a small MoE: real Megatron-Core, real SGLang server, on this CPU
	@$(PY) examples/demo.py $(ARGS)
test: setup            ## the whole suite
	@$(PY) -m pytest $(ARGS)
lint: setup
	@$(PY) -m ruff check megatron_grpo tests examples benchmarks
	@$(PY) -m mypy
clean:
	rm -rf .venv build dist *.egg-info runs
