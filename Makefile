# make demo: data, training, samples and the speed-up of the cache, in under 6 minutes on a laptop
# make test: everything that must hold, each claim at a small size
# make test-all: the same at full size
PYTHON ?= python3

.PHONY: demo test test-all lint clean

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/run.stamp: requirements.txt | .venv/bin/python
	.venv/bin/python -m pip install -q -r requirements.txt
	touch $@

.venv/dev.stamp: requirements.txt requirements-dev.txt | .venv/bin/python
	.venv/bin/python -m pip install -q -r requirements-dev.txt
	touch $@ .venv/run.stamp

demo: .venv/run.stamp
	test -f data/shakespeare_char/train.bin || .venv/bin/python data/shakespeare_char/prepare.py
	.venv/bin/python train.py config/train_shakespeare_char.py
	.venv/bin/python sample.py --use_cache=True --out_dir=out-shakespeare-char --num_samples=2 --max_new_tokens=300
	.venv/bin/python test_kv_cache.py

test: lint
	.venv/bin/python -m pytest -n auto --dist worksteal

test-all: lint
	.venv/bin/python -m pytest -n auto --dist worksteal --full

lint: .venv/dev.stamp
	.venv/bin/ruff check .

clean:
	rm -rf .venv out* data/*/*.bin data/*/meta.json
