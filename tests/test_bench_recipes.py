"""bench.py --mode=recipes counts iterations and seconds correctly, and its loops train. The speeds are not tested."""
from types import SimpleNamespace

import pytest
import torch
from conftest import run

from benchmarks import harness, recipes, trained
from benchmarks.harness import Asked
from benchmarks.loss import nats


def test_seconds_to_a_loss():
    """Between two evaluations by a line; an iteration takes half a second."""
    assert recipes.seconds_to(2.0, [0, 10, 20], [4.0, 3.0, 1.0], 0.5) == 7.5
    assert recipes.seconds_to(3.0, [0, 10, 20], [4.0, 3.0, 1.0], 0.5) == 5.0
    assert recipes.seconds_to(0.5, [0, 10, 20], [4.0, 3.0, 1.0], 0.5) is None


@pytest.fixture
def small(repo, monkeypatch):
    """A task of a tiny model on a small text, with two rates for each side and one change."""
    monkeypatch.chdir(repo)
    nanogpt = recipes.NANOGPT | dict(n_layer=1, n_head=2, n_embd=16, block_size=16)
    task = recipes.TASKS['char']._replace(nanogpt=nanogpt, iterations=3, changes=dict(rope=recipes.ROPE),
                                           left_out=('rope',),
                                           rates=recipes.RATES[2:4], recipe_rates=recipes.RECIPE_RATES[2:4])
    monkeypatch.setattr(recipes, 'TASKS', dict(char=task))
    monkeypatch.setattr(recipes, 'TIMED', 0.01)
    monkeypatch.setattr(trained, 'subprocess', SimpleNamespace(run=lambda command, **_: run(repo, *command[1:])))
    return task


def asked_for(part):
    return Asked('cpu', 'float32', None, None, None, [part],
                 dict(seed=1, seeds=2, iterations=0, repeats=1, json='', mode='recipes'))


def test_the_loops_compute_what_train_does(small):
    """nanoGPT's loop learns, and ours has the loss that train.py begins with."""
    loop = recipes.nanogpt_step(small, 0)
    losses = [loop() for _ in range(30)]
    assert losses[-1] < losses[0] - 0.2
    for settings in small.timed.values():
        step = recipes.our_step(small, settings, 0)
        assert step() == pytest.approx(losses[0], abs=0.1) and step() < losses[0] + 0.1


def test_each_recipe_has_the_seconds_of_nanogpts_run(small, monkeypatch):
    seconds = {"nanoGPT's loop": 0.4, 'nanoGPT': 0.2, 'rope': 0.3, 'the recipe': 0.1, 'the recipe + rope': 0.1}
    rows = [dict(recipe=name, iteration_s=s) for name, s in seconds.items()]
    monkeypatch.setattr(recipes, 'steps_of', lambda name, asked: rows)
    figures = harness.run_parts(asked_for('char'), recipes.PARTS)
    rows = figures['char']['rows']
    assert [row['iterations'] for row in rows] == [6, 6, 6, 4, 12, 12, 12, 12]
    assert [len(row['val']) for row in rows] == [1, 1, 2, 1, 1, 1, 2, 1]
    for first, second, best in (rows[:3], rows[4:7]):  # the first seed of the best is that of the lower rate
        assert best['val'][0] == min(first['mean'], second['mean'])
        assert best['settings'] == min(first, second, key=lambda row: row['mean'])['settings']
    for row in (rows[2], rows[6]):
        assert row['standard_error'] == pytest.approx(abs(row['val'][0] - row['val'][1]) / 2)
        assert row['mean'] == pytest.approx(sum(row['val']) / 2) and row['curve'][0][-1] == row['iterations']
        assert row['to_goal'] is None
    assert rows[3]['settings'] == rows[2]['settings'] | {'position': 'rope'}
    left, right = recipes.picture(figures, '')['panels']
    xs, ys, name, _ = left.lines[2]
    assert name == 'the recipe' and xs[-1] == pytest.approx(1.2) and ys == rows[-2]['curve'][1]
    assert right.lines[2][0][-1] == 12 * 24 * 16


def test_times_are_measured_again_where_the_figures_lack_a_recipe_or_are_of_another_machine(small, monkeypatch):
    rows = [dict(task='char', recipe=name, iteration_s=0.5) for name in ("nanoGPT's loop", *small.timed)]
    measured = [row | dict(iteration_s=0.1) for row in rows]
    monkeypatch.setattr(recipes, 'steps_of', lambda name, asked: measured)
    here = harness.describe_machine('cpu')
    for kept, machine, seconds in ((rows, here, 0.5), (rows[:-1], here, 0.1), ([], here, 0.1), (rows, 'another', 0.1)):
        monkeypatch.setattr(recipes, 'read_json', lambda path: dict(steps=dict(rows=kept, machine=machine)))
        assert recipes.iterations_of('char', asked_for('char'))['the recipe + rope'] == (3, seconds)


def test_steps_are_timed_in_turns(small):
    rows, = recipes.steps(asked_for('steps'))
    assert [row['recipe'] for row in rows] == ["nanoGPT's loop", 'nanoGPT', 'rope', 'the recipe', 'the recipe + rope']
    assert all(row['iteration_s'] > 0 for row in rows) and rows[0]['nanogpt_over'] == 1
    torch.set_float32_matmul_precision('highest')


def test_the_loss_of_a_large_vocabulary_is_measured_in_parts(small, monkeypatch):
    """The logits of a call of the model have at most 2^28 numbers."""
    sizes, model = [], recipes.model_of(small, small.nanogpt).eval()
    rows = torch.randint(model.config.vocab_size, (5, 17))
    expected = nats(model, rows)
    monkeypatch.setattr(model.config, 'vocab_size', 2**28 // 16 // 2)
    forward = model.forward
    monkeypatch.setattr(model, 'forward', lambda x, *args, **how: sizes.append(len(x)) or forward(x, *args, **how))
    assert torch.allclose(nats(model, rows), expected, atol=1e-6) and sizes == [2, 2, 1]
