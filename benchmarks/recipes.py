"""
What a setting brings to training in equal seconds: each change of the recipe alone, all together, and nanoGPT's run.

    OMP_NUM_THREADS=1 python bench.py --mode=recipes --json=recipes.json   (--only=steps, char, larger, words or docs)

All models are trained by train.py, in folders of their own; runs that are there already are not made again. nanoGPT's
run has a number of iterations, see TASKS. Every other recipe has as many as take the same seconds: they are computed
from the time of an iteration, measured in turns, so that other programs on the machine do not change them. (Trainings
are not timed, so all use oneDNN, which changes last bits only, and halves the time on AMD's processors.) Learning
rates of both sides are swept with one seed; models are trained with all seeds at the best rate of each side.
The loss is the mean over the first VALIDATION tokens of the validation text, or all if it has less, in nats a token.
"""
import csv
import math
import os
import statistics
from dataclasses import fields
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np
import torch

import device as devices
from benchmarks.harness import Case, Panel, Part, describe_machine, read_json, take_turns
from benchmarks.loss import nats
from benchmarks.trained import load_trained, train_once
from model import GPT, GPTConfig
from training.batches import Batches, open_tokens, prepare, vocab_size_of
from training.cpu import use_onednn
from training.optimizer import make_optimizer

PICTURE, CPU_ONLY = 'recipes.png', "the models are trained"
FOLDER = os.path.join('out-bench', 'recipes')
TIMED = 0.5  # seconds of a timed run, at least
CURVE = 20  # evaluations of a run
VALIDATION = 2**17  # tokens, at most

# settings of train.py: NANOGPT has those of nanoGPT for a CPU, the others change some of them
NANOGPT = dict(block_size=64, batch_size=12, n_layer=4, n_head=4, n_embd=128, dropout=0.0, bias=False,
               learning_rate=1e-3, min_lr=1e-4, weight_decay=0.1, beta1=0.9, beta2=0.99, warmup_iters=100)
RATES = [dict(learning_rate=rate) for rate in (3e-4, 6e-4, 1e-3, 3e-3, 6e-3, 1e-2)]
FAST = dict(onednn=True, dtype='bfloat16')
MUON = dict(optimizer='muon', learning_rate=1e-2, muon_lr=0.01)
ROPE = dict(position='rope')
WARMUP = dict(warmup_iters=20)
CHANGES = {
    'oneDNN': dict(onednn=True),
    'oneDNN, bfloat16': FAST,
    'Muon': MUON,
    'rope': ROPE,
    'warmup of 20': WARMUP,
    'wsd': dict(lr_schedule='wsd', cooldown_frac=0.4),
    'rms, swiglu': dict(norm='rms', mlp='swiglu', n_inner=344),
    'qk_norm': dict(qk_norm=True),
    'untied': dict(tied=False),
    'batch of 24': dict(batch_size=24),
}
RECIPE_RATES = [dict(learning_rate=rate, muon_lr=muon_lr)
                for rate, muon_lr in ((3e-3, 0.01), (6e-3, 0.01), (1e-2, 0.01), (1e-2, 0.005), (1e-2, 0.02))]


class Task(NamedTuple):
    """
    What is trained. data: a folder of data/. nanogpt, iterations: nanoGPT's settings, and how many iterations it has.
    recipe: what the recipe changes; changes: {name: settings} that are measured alone, at nanoGPT's best rate;
    left_out: names of those that are also measured on top of the recipe. rates, recipe_rates: those that are swept.
    goal: a loss; a row has the seconds until its runs reach it.
    """
    data: str
    nanogpt: dict
    iterations: int
    recipe: dict
    changes: dict
    rates: list = RATES[2:]
    recipe_rates: list = RECIPE_RATES[1:3]
    left_out: tuple = ()
    goal: float = -math.inf

    @property
    def timed(self):
        """{name: settings} whose iterations are timed. A learning rate does not change the time."""
        return {'nanoGPT': {}} | self.changes | {'the recipe': self.recipe} | {
            f'the recipe + {name}': self.recipe | self.changes[name] for name in self.left_out}


RECIPE = FAST | MUON | ROPE | WARMUP | dict(batch_size=24)
TASKS = dict(
    char=Task('data/shakespeare_char', NANOGPT, 2000, RECIPE, CHANGES, recipe_rates=RECIPE_RATES[1:],
              left_out=('wsd', 'rms, swiglu', 'qk_norm', 'untied'), goal=1.88),  # the loss that nanoGPT's README gives
    # the runs below are short, so nanoGPT's settings get the shorter warmup too
    larger=Task('data/shakespeare_char', NANOGPT | WARMUP | dict(n_layer=6, n_head=6, n_embd=384, block_size=256,
                                                                 batch_size=4), 500, RECIPE | dict(batch_size=8), {},
                RATES[:4], RECIPE_RATES[:2]),
    words=Task('data/shakespeare', NANOGPT | WARMUP, 200, RECIPE, {}, RATES[1:5]),  # lower rates: the text is short
    docs=Task('data/docstrings', NANOGPT | WARMUP, 200, RECIPE,
              {name: CHANGES[name] for name in ('oneDNN, bfloat16', 'Muon', 'rope', 'batch of 24')}),
)


def model_of(task, settings):
    """A new model with the shape that the settings have, and a vocabulary for the data of the task."""
    shape = {f.name: settings[f.name] for f in fields(GPTConfig) if f.name in settings}
    return GPT(GPTConfig(vocab_size=vocab_size_of(task.data), **shape))


def our_step(task, settings, seed):
    """A function that runs the next iteration as train.py does with these settings, and returns its loss."""
    own = dict(optimizer='adamw', muon_lr=0.0, muon_weight_decay=0.0, dtype='float32', onednn=False)
    s = task.nanogpt | own | settings
    torch.manual_seed(seed)
    model = model_of(task, s)
    if s['onednn']:
        use_onednn(model, s['dtype'])
    optimizer, amp, numbers = make_optimizer(model, 'cpu', s), devices.autocast('cpu', s['dtype']), count()
    batches = Batches(task.data, 'train', s['batch_size'], s['block_size'], model.config.vocab_size, 'cpu', seed)

    def step():
        x, y = batches(next(numbers))
        with amp:
            loss = model(x, y)[1]
        loss.backward()
        value = loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value
    return step


def nanogpt_step(task, seed):
    """
    A function that runs an iteration as nanoGPT's train.py does on a CPU, written from what it does: it opens the file
    of tokens for each batch and stacks the rows, its AdamW is fused on CUDA only, and it reads the loss at each
    logged iteration. The model's operations are those of model.py.
    """
    s = task.nanogpt
    torch.manual_seed(seed)
    model = model_of(task, s)
    groups = [dict(params=[p for p in model.parameters() if p.dim() >= 2], weight_decay=s['weight_decay']),
              dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=s['learning_rate'], betas=(s['beta1'], s['beta2']))
    scaler, T = torch.amp.GradScaler('cpu', enabled=False), s['block_size']

    def get_batch():
        data = np.memmap(os.path.join(task.data, 'train.bin'), dtype=np.uint16, mode='r')
        starts = torch.randint(len(data) - T, (s['batch_size'],))
        return (torch.stack([torch.from_numpy(data[i + skip:i + skip + T].astype(np.int64)) for i in starts])
                for skip in (0, 1))

    def step():
        for group in optimizer.param_groups:
            group['lr'] = s['learning_rate']
        x, y = get_batch()
        loss = model(x, y)[1]
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()
    return step


def steps_of(name, asked):
    """Rows of a task: the time of an iteration of nanoGPT's loop, and of each recipe; over: nanoGPT's over it."""
    task = TASKS[name]
    if not os.path.exists(os.path.join(task.data, 'train.bin')):
        prepare(task.data)
    torch.set_float32_matmul_precision('high')  # as train.py does
    cases = [Case(dict(task=name, recipe="nanoGPT's loop"), nanogpt_step(task, asked.seed))]
    cases += [Case(dict(task=name, recipe=recipe), our_step(task, settings, asked.seed))
              for recipe, settings in task.timed.items()]
    first, *_ = measured = take_turns(cases, asked.repeats, f'iterations, {name}', TIMED)
    return [m.row(iteration_s=m.seconds, nanogpt_over=first.over(m)) for m in measured]


def steps(asked):
    """See `steps_of`."""
    for name in TASKS:
        yield steps_of(name, asked)


def iterations_of(name, asked):
    """{recipe: (how many iterations take as long as nanoGPT's run, the seconds of one)} of a task, by `steps`."""
    task, before = TASKS[name], read_json(asked.json).get('steps', {})
    rows = [row for row in before.get('rows', []) if row['task'] == name]
    if not task.timed.keys() <= {row['recipe'] for row in rows} or before['machine'] != describe_machine('cpu'):
        rows = steps_of(name, asked)
    seconds = {row['recipe']: row['iteration_s'] for row in rows}
    in_all = (asked.iterations or task.iterations) * seconds["nanoGPT's loop"]
    return {recipe: (max(1, round(in_all / s)), s) for recipe, s in seconds.items()}


def train(task, settings, seed, iterations):
    """Train by `train_once`. Returns the folder."""
    dataset = os.path.basename(task.data)
    changed = '-'.join(f'{name}={value}' for name, value in settings.items() if task.nanogpt.get(name) != value)
    shape = '-'.join(str(task.nanogpt[name]) for name in ('n_layer', 'n_embd', 'block_size', 'batch_size'))
    folder = os.path.join(FOLDER, f'{dataset}-{shape}-{changed or "nanogpt"}-{seed}-{iterations}')
    train_once(folder, task.nanogpt | settings | dict(
        seed=seed, max_iters=iterations, lr_decay_iters=iterations, device='cpu', dataset=dataset, onednn=True,
        eval_interval=max(1, iterations // CURVE), eval_iters=max(10, iterations // 40)))
    return folder


def curve(folder):
    """The evaluations of a run: (iterations, losses on some batches of the validation text)."""
    with open(os.path.join(folder, 'log.csv'), newline='') as f:
        rows = [row for row in csv.DictReader(f) if row['val_loss']]
    return [int(row['iter']) for row in rows], [float(row['val_loss']) for row in rows]


def seconds_to(loss, iterations, losses, iteration_s):
    """Seconds of training until a curve is at this loss for the first time, between points by a line, or None."""
    for i in range(1, len(losses)):
        if losses[i] <= loss:
            part = (losses[i - 1] - loss) / (losses[i - 1] - losses[i])
            return iteration_s * (iterations[i - 1] + part * (iterations[i] - iterations[i - 1]))
    return None


def row_of(task, name, settings, seeds, iterations, iteration_s):
    """
    A row: val, the loss of the validation text, of each seed; its mean and standard error; to_goal, the median seconds
    to the goal of the task; curve: iterations, and the mean losses over the seeds on some batches of the text.
    """
    folders = [train(task, settings, seed, iterations) for seed in seeds]
    models = [load_trained(folder) for folder in folders]
    curves, T, s = [curve(folder) for folder in folders], models[0].config.block_size, task.nanogpt | settings
    tokens = torch.from_numpy(open_tokens(task.data, 'val', T)[:VALIDATION].astype(np.int64))
    val = [nats(model, tokens.unfold(0, T + 1, T)).mean().item() for model in models]
    error = statistics.stdev(val) / len(val) ** 0.5 if len(val) > 1 else None
    reached = [seconds_to(task.goal, *points, iteration_s) for points in curves]
    ns, losses = curves[0][0], [statistics.mean(column) for column in zip(*(losses for _, losses in curves))]
    return dict(recipe=name, settings={k: str(v) for k, v in settings.items()}, iterations=iterations,
                iteration_ms=1e3 * iteration_s, tokens=iterations * s['batch_size'] * s['block_size'], val=val,
                mean=statistics.mean(val), standard_error=error,
                to_goal=None if None in reached else statistics.median(reached), curve=[ns, losses])


def losses(name, asked):
    """The rows of a task, see `row_of`: learning rates, each change alone, the recipe."""
    task, times = TASKS[name], iterations_of(name, asked)
    seeds = range(asked.seed, asked.seed + asked.seeds)

    def row(recipe, settings, timed, seeds=seeds[:1]):
        return row_of(task, recipe, settings, seeds, *times[timed])

    def sweep(recipe, rates):
        """Yields the rows with each of the rates. Returns the settings of the best one."""
        swept = []
        for rate in rates:
            settings = task.timed[recipe] | rate
            of_rate = ', '.join(f'{rate[name]:g}' for name in ('learning_rate', 'muon_lr') if name in rate)
            swept.append((row(f'{recipe}, {of_rate}', settings, recipe), settings))
            yield [swept[-1][0]]
        return min(swept, key=lambda each: each[0]['mean'])[1]

    best = yield from sweep('nanoGPT', task.rates)
    yield [row('nanoGPT, best rate', best, 'nanoGPT', seeds)]
    for change, settings in task.changes.items():
        yield [row(f'+ {change}', best | settings, change)]
    best = yield from sweep('the recipe', task.recipe_rates)
    yield [row('the recipe', best, 'the recipe', seeds)]
    for change in task.left_out:
        yield [row(f'the recipe + {change}', best | task.changes[change], f'the recipe + {change}')]


def panel(title, rows, unit):
    """The curves of the rows, with those of one change dashed. unit: seconds or tokens, the x axis."""
    lines = []
    for i, row in enumerate(sorted(rows, key=lambda row: '+' in row['recipe'])):
        ns, losses = row['curve']
        each = row['iteration_ms'] / 1e3 if unit == 'seconds' else row['tokens'] / row['iterations']
        how = dict(lw=1, ls='--') if '+' in row['recipe'] else dict(lw=2)
        lines.append(([n * each for n in ns], losses, row['recipe'], dict(how, color=f'C{i % 10}')))
    lowest, highest = min(line[1][-1] for line in lines), max(line[1][-1] for line in lines)
    return Panel(title, lines, axes=dict(
        xlabel=unit, ylabel='validation loss, nats a token',
        ylim=(lowest - 0.1, highest + 1.5 * (highest - lowest) + 0.1)))


def picture(figures, machine):
    """The arguments of `harness.draw`: loss by seconds and by tokens, and of other tasks by seconds. None without."""
    panels, measured = [], [name for name in TASKS if name in figures]
    for name in measured:
        rows = [row for row in figures[name]['rows'] if row['recipe'] == 'nanoGPT, 0.001' or not (
            ', 0.' in row['recipe'] or row['recipe'].startswith('the recipe +'))]
        panels.append(panel(f'{name}, equal seconds', rows, 'seconds'))
        if name == 'char':
            panels.append(panel(f'{name}, by tokens', rows, 'tokens'))
    return dict(panels=panels, title=figures[measured[0]]['machine'], columns=2, size=(7, 5)) if panels else None


COLUMNS = 'recipe iterations iteration_ms tokens mean standard_error val to_goal'
PARTS = dict(
    steps=Part(steps, 4, "an iteration", 'task recipe iteration_s nanogpt_over'),
    **{name: Part(partial(losses, name), minutes, f"{title}, each recipe in the same seconds", COLUMNS)
       for name, minutes, title in (
           ('char', 40, "characters, 4 layers of 128 channels"), ('larger', 80, "characters, 6 layers of 384 channels"),
           ('words', 40, "words of Shakespeare, 4 layers of 128 channels"),
           ('docs', 60, "words of docstrings, 4 layers of 128 channels"))},
)
