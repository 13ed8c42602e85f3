# `make demo` and `make test` set up everything they need in .venv (see scripts/bootstrap.sh).
PY := .venv/bin/python
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test lint docs setup clean
setup:
	@scripts/bootstrap.sh
demo: setup            ## RL of a small MoE: real Megatron-Core, real SGLang server, on this CPU
	@$(PY) examples/demo.py $(ARGS)
test: setup            ## the whole suite
	@$(PY) -m pytest $(ARGS)
lint: setup
	@$(PY) -m ruff check megatron_grpo tests examples benchmarks
	@$(PY) -m mypy
docs: setup            ## the pages that are made from the code
	@$(PY) -m megatron_grpo.algorithms > docs/papers.md
	@$(PY) -W ignore -m megatron_grpo.trainer.flag_table > docs/flags.md
clean:
	rm -rf .venv build dist *.egg-info runs
