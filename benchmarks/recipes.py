"""
What a setting brings to training in equal seconds: each change of the recipe alone, all together, nanoGPT's settings.

All models are trained by train.py, in folders of their own; runs that are there already are not made again. nanoGPT's
settings have ITERATIONS. Every other recipe has as many as take the same seconds: they are computed from the time of an
iteration, measured in turns, so that other programs on the machine do not change them. (All trainings use oneDNN, which
changes last bits only, and halves the time on AMD's processors.) Learning rates of both sides are swept with one seed;
models are trained with all seeds at the best rate of each side. The loss is the mean over the first VALIDATION tokens
of the validation text, in nats a token.
"""
import csv
import os
import statistics
import subprocess
import sys
from functools import partial

import numpy as np
import torch

import checkpoint as checkpoints
from benchmarks.harness import Case, Part, describe_machine, read_json, take_turns
from model import GPT, GPTConfig
from training.batches import open_tokens

CPU_ONLY = "the models are trained"
FOLDER, DATA = os.path.join('out-bench', 'recipes'), 'data/shakespeare_char'
ITERATIONS, VALIDATION = 2000, 2**17
N_STEPS = 50  # iterations of a run that is timed

# settings of train.py: NANOGPT has those of nanoGPT for a CPU, the others change some of them
NANOGPT = dict(block_size=64, batch_size=12, n_layer=4, n_head=4, n_embd=128, dropout=0.0, bias=False,
               learning_rate=1e-3, min_lr=1e-4, weight_decay=0.1, beta1=0.9, beta2=0.99, warmup_iters=100)
CHANGES = {
    'oneDNN': dict(onednn=True),
    'oneDNN, bfloat16': dict(onednn=True, dtype='bfloat16'),
    'Muon': dict(optimizer='muon', learning_rate=1e-2, muon_lr=0.01),
    'rope': dict(position='rope'),
    'warmup of 20': dict(warmup_iters=20),
    'wsd': dict(lr_schedule='wsd', cooldown_frac=0.4),
    'rms, swiglu': dict(norm='rms', mlp='swiglu', n_inner=344),
    'qk_norm': dict(qk_norm=True),
    'untied': dict(tied=False),
    'batch of 24': dict(batch_size=24),
}
RECIPE = {name: value for change in ('oneDNN, bfloat16', 'Muon', 'rope', 'warmup of 20', 'batch of 24')
          for name, value in CHANGES[change].items()}
TIMED = {'nanoGPT': {}} | CHANGES | {'the recipe': RECIPE}  # a learning rate does not change the time
RATES = {'nanoGPT': [dict(learning_rate=rate) for rate in (1e-3, 3e-3, 6e-3, 1e-2)],
         'the recipe': [dict(learning_rate=rate, muon_lr=muon_lr)
                        for rate, muon_lr in ((6e-3, 0.01), (1e-2, 0.01), (1e-2, 0.005), (1e-2, 0.02))]}


def train(folder, settings):
    """Train a model with these settings of train.py, in a folder. ValueError if train.py fails."""
    settings = settings | dict(device='cpu', dataset=os.path.basename(DATA), out_dir=folder)
    command = [sys.executable, 'train.py', 'config/train_shakespeare_char.py',
               *(f'--{name}={value}' for name, value in settings.items())]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1]}")


def iteration_seconds(settings, seed):
    """The time of an iteration, the median of the rows of a short run's log."""
    folder = os.path.join(FOLDER, 'steps')
    train(folder, NANOGPT | settings | dict(seed=seed, max_iters=N_STEPS, eval_iters=1))
    with open(os.path.join(folder, 'log.csv'), newline='') as f:
        return statistics.median(float(row['ms_per_iter']) / 1e3 for row in csv.DictReader(f) if row['ms_per_iter'])


def steps(asked):
    """A row for each recipe: the time of an iteration, and nanoGPT's over it."""
    cases = [Case(dict(recipe=name), partial(iteration_seconds, settings, asked.seed))
             for name, settings in TIMED.items()]
    first, *_ = measured = take_turns(cases, asked.repeats, 'iterations')
    for m in measured:
        m.runs = m.results  # without the start of the process
    yield [m.row(iteration_s=m.seconds, nanogpt_over=first.over(m)) for m in measured]


def iterations_of(asked):
    """{recipe: iterations that take as long as nanoGPT's} by the rows of `steps` in the JSON file, or by new ones."""
    before = read_json(asked.json).get('steps', {})
    rows = before.get('rows', []) if before.get('machine') == describe_machine('cpu') else []
    if not TIMED.keys() <= {row['recipe'] for row in rows}:
        rows, = steps(asked)
    seconds = {row['recipe']: row['iteration_s'] for row in rows}
    in_all = (asked.iterations or ITERATIONS) * seconds['nanoGPT']
    return {recipe: max(1, round(in_all / s)) for recipe, s in seconds.items()}


def trained(settings, seed, iterations):
    """
    The model that train.py makes of these settings, in eval mode. It is trained once; the folder's name says by what.
    ValueError if train.py fails or is stopped.
    """
    changed = '-'.join(f'{name}={value}' for name, value in settings.items() if NANOGPT.get(name) != value)
    folder = os.path.join(FOLDER, f"{changed or 'nanogpt'}-{seed}-{iterations}")
    settings = NANOGPT | settings | dict(seed=seed, max_iters=iterations, lr_decay_iters=iterations, onednn=True,
                                         always_save_checkpoint=True)
    if not is_trained(folder, settings):
        print(f"training {folder}", flush=True)
        train(folder, settings)
        if not is_trained(folder, settings):
            raise ValueError(f"{folder}: train.py was stopped")
    return checkpoints.build(checkpoints.load(os.path.join(folder, 'ckpt.pt')), GPT, GPTConfig).eval()


def is_trained(folder, settings):
    """Does a folder have the checkpoint of a finished run with these settings?"""
    path = os.path.join(folder, 'ckpt.pt')
    saved = checkpoints.load(path) if os.path.exists(path) else dict(iter_num=0, config={})
    return saved['iter_num'] == settings['max_iters'] and settings.items() <= saved['config'].items()


def losses(asked):
    """Rows of the rates of both sides, of each change at nanoGPT's best rate, and of both sides with all seeds."""
    iterations, seeds = iterations_of(asked), range(asked.seed, asked.seed + asked.seeds)

    @torch.no_grad()
    def row(name, settings, timed, seeds=seeds[:1]):
        """val: the loss of each seed."""
        val, s = [], NANOGPT | settings
        tokens = torch.from_numpy(open_tokens(DATA, 'val', s['block_size'])[:VALIDATION].astype(np.int64))
        pieces = tokens.unfold(0, s['block_size'] + 1, s['block_size'])
        for seed in seeds:
            model = trained(settings, seed, iterations[timed])
            sums = [len(part) * model(part[:, :-1], part[:, 1:])[1].item() for part in pieces.split(128)]
            val.append(sum(sums) / len(pieces))
        return dict(recipe=name, settings={k: str(v) for k, v in settings.items()}, iterations=iterations[timed],
                    tokens=iterations[timed] * s['batch_size'] * s['block_size'], val=val, mean=statistics.mean(val),
                    standard_error=statistics.stdev(val) / len(val) ** 0.5 if len(val) > 1 else None)

    for side in RATES:
        swept = []
        for rate in RATES[side]:
            settings = TIMED[side] | rate
            swept.append((row(f"{side}, {', '.join(map(str, rate.values()))}", settings, side), settings))
            yield [swept[-1][0]]
        best = min(swept, key=lambda each: each[0]['mean'])[1]
        yield [row(f'{side}, best rate', best, side, seeds)]
        for change, settings in CHANGES.items() if side == 'nanoGPT' else ():
            yield [row(f'+ {change}', best | settings, change)]


PARTS = dict(
    steps=Part(steps, 9, "an iteration", 'recipe iteration_s nanogpt_over'),
    char=Part(losses, 40, "characters of Shakespeare, each recipe in the same seconds",
              'recipe iterations tokens mean standard_error val'),
)
