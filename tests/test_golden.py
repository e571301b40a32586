"""Tokens and trained weights are those of golden.json; see golden.py, which writes it."""
import json

import golden
import pytest
from conftest import sizes

with open(golden.PATH) as f:
    EXPECTED = json.load(f)
elsewhere = pytest.mark.skipif(golden.machine() != EXPECTED['machine'], reason=(
    f"bits depend on processor and torch: golden.json was made on {EXPECTED['machine']}, this is {golden.machine()}"))


@pytest.mark.parametrize('way', [*golden.FLOATS, *(pytest.param(way, marks=elsewhere) for way in golden.ROUNDED)])
def test_tokens(way):
    found = golden.tokens(way, part=sizes(15, 1))
    assert found and found == {case: EXPECTED['tokens'][way].get(case) for case in found}


@elsewhere
def test_weights_after_50_steps():
    assert golden.hash_of(golden.trained_by_hand()) == EXPECTED['weights']['loop']


@elsewhere
@pytest.mark.skipif(sizes(True, False), reason="other tests run train.py: this is for `make test-all`")
def test_weights_after_50_iterations_of_the_script():
    assert golden.hash_of(golden.trained_by_script()) == EXPECTED['weights']['train.py']
