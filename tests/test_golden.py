"""Tokens and trained weights are those of golden.json; see golden.py, which writes it."""
import json

import golden
import pytest
from conftest import sizes

EXPECTED = golden.golden()
HERE, THERE = golden.machine(), EXPECTED['machine']
elsewhere = pytest.mark.skipif(HERE != THERE, reason=f"bits depend on processor and torch: golden.json was made on "
                                                     f"{THERE}, this is {HERE}")


def marked(way):
    return pytest.param(way, marks=elsewhere) if way in golden.ROUNDED else way


@pytest.mark.parametrize('way', map(marked, golden.WAYS))
def test_tokens(way):
    of_case, rows_of = golden.tokens(way, part=sizes(15, 1))
    assert of_case
    lines = golden.differences(EXPECTED, way, of_case, rows_of)
    assert not lines, '\n'.join(lines)


@elsewhere
def test_weights_after_50_steps():
    assert golden.hash_of(golden.trained_by_hand()) == EXPECTED['weights']['loop']


@elsewhere
@pytest.mark.skipif(sizes(True, False), reason="other tests run train.py: this is for `make test-all`")
def test_weights_after_50_iterations_of_the_script():
    assert golden.hash_of(golden.trained_by_script()) == EXPECTED['weights']['train.py']


def test_a_difference_is_told():
    of_case, rows_of = golden.tokens('uncached', part=45)
    case, name = next(iter(of_case.items()))
    changed = json.loads(json.dumps(EXPECTED))
    changed['tokens']['uncached'][case] = 'another'
    changed['rows']['another'] = [rows_of[name][0][:3] + '?' + rows_of[name][0][4:], *rows_of[name][1:]]
    line, = golden.differences(changed, 'uncached', of_case, rows_of)
    assert case in line and 'row 0 differs from token 3 on' in line
