"""bench.py --mode=recipes counts iterations and seconds correctly, and trains. The speeds are not tested."""
import os
from types import SimpleNamespace

import pytest
from conftest import run

from benchmarks import harness, recipes


@pytest.fixture
def small(repo, monkeypatch):
    """A tiny model on a small text, with two rates for each side and one change."""
    monkeypatch.chdir(repo)
    rope = recipes.CHANGES['rope']
    for name, value in dict(
            NANOGPT=recipes.NANOGPT | dict(n_layer=1, n_head=2, n_embd=16, block_size=16), ITERATIONS=3, N_STEPS=20,
            CHANGES=dict(rope=rope), TIMED={'nanoGPT': {}, 'rope': rope, 'the recipe': recipes.RECIPE},
            RATES={name: rates[1:3] for name, rates in recipes.RATES.items()}).items():
        monkeypatch.setattr(recipes, name, value)
    monkeypatch.setattr(recipes, 'subprocess', SimpleNamespace(run=lambda command, **_: run(repo, *command[1:])))


ASKED = SimpleNamespace(device='cpu', seed=1, seeds=2, iterations=0, repeats=1, json='', mode='recipes')


def test_each_recipe_has_the_seconds_of_nanogpts(small, monkeypatch):
    times = [dict(recipe=name, iteration_s=s) for name, s in {'nanoGPT': 0.2, 'rope': 0.3, 'the recipe': 0.1}.items()]
    monkeypatch.setattr(recipes, 'steps', lambda asked: [times])
    rows = [row for some in recipes.losses(ASKED) for row in some]
    assert [row['iterations'] for row in rows] == [3, 3, 3, 2, 6, 6, 6]
    assert [len(row['val']) for row in rows] == [1, 1, 2, 1, 1, 1, 2] and rows[-1]['tokens'] == 6 * 24 * 16
    for first, second, best in (rows[:3], rows[4:]):  # the first seed of the best is that of the better rate
        assert best['val'][0] == min(first['mean'], second['mean'])
        assert best['settings'] == min(first, second, key=lambda row: row['mean'])['settings']
        assert best['standard_error'] == pytest.approx(abs(best['val'][0] - best['val'][1]) / 2)
        assert best['mean'] == pytest.approx(sum(best['val']) / 2)
    assert rows[3]['settings'] == rows[2]['settings'] | {'position': 'rope'}
    written = when_written()
    assert [row for some in recipes.losses(ASKED) for row in some] == rows
    assert len(written) == 7 and when_written() == written, "models are trained once"
    with pytest.raises(ValueError, match='failed: train.py: error: '):
        recipes.trained(dict(n_head=3), 1, 2)


def when_written():
    folders = [os.path.join(recipes.FOLDER, name) for name in os.listdir(recipes.FOLDER)]
    return {folder: os.path.getmtime(os.path.join(folder, 'ckpt.pt')) for folder in folders}


def test_times_are_measured_again_where_the_figures_lack_a_recipe_or_are_of_another_machine(small, monkeypatch):
    rows = [dict(recipe=name, iteration_s=0.5 / n) for n, name in enumerate(recipes.TIMED, 1)]
    measured = [row | dict(iteration_s=0.1) for row in rows]
    monkeypatch.setattr(recipes, 'steps', lambda asked: [measured])
    here = harness.describe_machine('cpu')
    for kept, machine, n in ((rows, here, 9), (rows[:-1], here, 3), ([], here, 3), (rows, 'another', 3)):
        monkeypatch.setattr(recipes, 'read_json', lambda path: dict(steps=dict(rows=kept, machine=machine)))
        assert recipes.iterations_of(ASKED)['the recipe'] == n


def test_steps_are_timed_in_turns(small):
    rows, = recipes.steps(ASKED)
    assert [row['recipe'] for row in rows] == ['nanoGPT', 'rope', 'the recipe']
    assert all(row['iteration_s'] > 0 for row in rows) and rows[0]['nanogpt_over'] == 1
