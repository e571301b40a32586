"""bench.py --mode=recipes counts iterations and seconds correctly, and its loops train. The speeds are not tested."""
from types import SimpleNamespace

import pytest
import torch
from conftest import run

from benchmarks import harness, recipes
from benchmarks.harness import Asked


def test_seconds_to_a_loss():
    """Between two evaluations by a line; an iteration takes half a second."""
    assert recipes.seconds_to(2.0, [0, 10, 20], [4.0, 3.0, 1.0], 0.5) == 7.5
    assert recipes.seconds_to(3.0, [0, 10, 20], [4.0, 3.0, 1.0], 0.5) == 5.0
    assert recipes.seconds_to(0.5, [0, 10, 20], [4.0, 3.0, 1.0], 0.5) is None


@pytest.fixture
def small(repo, monkeypatch):
    """Two recipes of a tiny model on a small text."""
    monkeypatch.chdir(repo)
    monkeypatch.setattr(recipes, 'NANOGPT', recipes.NANOGPT | dict(n_layer=1, n_head=2, n_embd=16, block_size=16))
    monkeypatch.setattr(recipes, 'RECIPES', {name: recipes.RECIPES[name] for name in ('nanoGPT', 'the recipe')})
    monkeypatch.setattr(recipes, 'N_STEPS', 2)
    monkeypatch.setattr(recipes, 'subprocess', SimpleNamespace(run=lambda command, **_: run(repo, *command[1:])))


def test_the_loops_compute_what_train_does(small):
    """nanoGPT's loop learns, and ours has the loss that train.py begins with."""
    loop = recipes.nanogpt_step(0)
    losses = [loop(k) for k in range(30)]
    assert losses[-1] < losses[0] - 0.2
    for settings in recipes.RECIPES.values():
        step = recipes.our_step(settings, 0)
        assert step(0) == pytest.approx(losses[0], abs=0.1) and step(1) < losses[0] + 0.1


def test_each_recipe_has_the_seconds_of_nanogpts_run(small, monkeypatch, tmp_path):
    seconds = {"nanoGPT's loop": 0.4, 'nanoGPT': 0.2, 'the recipe': 0.1}
    rows = [dict(recipe=name, iteration_s=s) for name, s in seconds.items()]
    monkeypatch.setattr(recipes, 'steps', lambda asked: iter([rows]))
    asked = Asked('cpu', 'float32', None, None, None, ['losses'],
                  dict(seed=1, seeds=2, iterations=3, repeats=1, json='', mode='recipes'))
    figures = harness.run_parts(asked, recipes.PARTS)
    nanogpt, recipe = figures['losses']['rows']
    assert (nanogpt['iterations'], recipe['iterations']) == (6, 12)
    for row in (nanogpt, recipe):
        assert len(row['val']) == 2 and row['standard_error'] == pytest.approx(abs(row['val'][0] - row['val'][1]) / 2)
        assert row['mean'] == pytest.approx(sum(row['val']) / 2) and row['curve'][0][-1] == row['iterations']
        assert row['to_goal'] is None
    left, right = recipes.picture(figures, '')['panels']
    xs, ys, name, _ = left.lines[1]
    assert name == 'the recipe' and xs[-1] == pytest.approx(1.2) and ys == recipe['curve'][1]
    assert right.lines[1][0][-1] == 12 * 24 * 16


def test_steps_are_timed_in_turns(small):
    asked = Asked('cpu', 'float32', None, None, None, ['steps'], dict(seed=1, repeats=1, json=''))
    rows, = recipes.steps(asked)
    assert [row['recipe'] for row in rows] == ["nanoGPT's loop", 'nanoGPT', 'the recipe']
    assert all(row['iteration_s'] > 0 for row in rows) and rows[0]['nanogpt_over'] == 1
    torch.set_float32_matmul_precision('highest')
