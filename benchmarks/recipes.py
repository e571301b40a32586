"""
What a setting brings to training in equal seconds: each change of the recipe alone, all together, and nanoGPT's run.

    python bench.py --mode=recipes --json=recipes.json          (--only=steps, rates or losses for a part)

All train nanoGPT's model for a CPU (4 layers of 128 channels, a context of 64) by train.py, in folders of their own;
runs that are there already are not made again. nanoGPT's command has 2,000 iterations. Every other recipe has as many
as take the same seconds: they are computed from the time of an iteration, measured in turns, so that other programs on
the machine do not change them. The loss is that of the whole validation text, in nats a character.
"""
import csv
import os
import statistics
import subprocess
import sys
from dataclasses import fields

import numpy as np
import torch

import checkpoint as checkpoints
import device as devices
import tokenizer as tokenizers
from benchmarks.experiments.positions import DATA, validation_text
from benchmarks.harness import Case, Panel, Part, describe_machine, read_json, take_turns
from benchmarks.loss import nats
from model import GPT, GPTConfig
from training.batches import Batches, prepare
from training.cpu import use_onednn
from training.optimizer import make_optimizer

PICTURE, CPU_ONLY = 'recipes.png', "the models are trained"
FOLDER = os.path.join('out-bench', 'recipes')
ITERATIONS = 2000  # of nanoGPT's run
N_STEPS = 10  # iterations of a timed run
GOAL = 1.88  # nats: what nanoGPT's README gives for its command
CURVE = 20  # evaluations of a run

# train.py's settings: nanoGPT's, and what each recipe changes of them
NANOGPT = dict(block_size=64, batch_size=12, n_layer=4, n_head=4, n_embd=128, dropout=0.0, bias=False,
               learning_rate=1e-3, min_lr=1e-4, weight_decay=0.1, beta1=0.9, beta2=0.99, warmup_iters=100)
TUNED = dict(learning_rate=6e-3)  # the best of `rates`
FAST = dict(onednn=True, dtype='bfloat16')
MUON = dict(optimizer='muon', learning_rate=1e-2, muon_lr=0.01)
WSD = dict(lr_schedule='wsd', cooldown_frac=0.4)
ROPE = dict(position='rope')
RECIPE = FAST | MUON | ROPE | dict(batch_size=24)
LLAMA = dict(norm='rms', mlp='swiglu', n_inner=344)
RECIPES = {
    'nanoGPT': {},
    'nanoGPT, best rate': TUNED,
    '+ oneDNN': TUNED | dict(onednn=True),
    '+ oneDNN, bfloat16': TUNED | FAST,
    '+ muon': TUNED | MUON,
    '+ wsd': TUNED | WSD,
    '+ rope': TUNED | ROPE,
    '+ rms, swiglu': TUNED | LLAMA,
    '+ qk_norm': TUNED | dict(qk_norm=True),
    '+ untied': TUNED | dict(tied=False),
    '+ batch of 24': TUNED | dict(batch_size=24),
    'the recipe': RECIPE,
}
RATES = {
    **{f'nanoGPT, rate {rate:g}': dict(learning_rate=rate) for rate in (1e-3, 3e-3, 6e-3, 1e-2)},
    **{f'the recipe, rate of Muon {rate:g}': RECIPE | dict(muon_lr=rate) for rate in (0.005, 0.01, 0.02)},
    **{f'the recipe, rate of AdamW {rate:g}': RECIPE | dict(learning_rate=rate) for rate in (3e-3, 1e-2)},
}


def model_of(settings):
    """A new model with the shape that the settings have, and a vocabulary for DATA."""
    shape = {f.name: settings[f.name] for f in fields(GPTConfig) if f.name in settings}
    return GPT(GPTConfig(vocab_size=len(tokenizers.state_of_dataset(DATA)['chars']), **shape))


def our_step(settings, seed):
    """A function that runs iteration k as train.py does with these settings."""
    s = NANOGPT | dict(optimizer='adamw', muon_lr=0.0, muon_weight_decay=0.0, dtype='float32', onednn=False) | settings
    torch.manual_seed(seed)
    model = model_of(s)
    if s['onednn']:
        use_onednn(model, s['dtype'])
    optimizer, amp = make_optimizer(model, 'cpu', s), devices.autocast('cpu', s['dtype'])
    batches = Batches(DATA, 'train', s['batch_size'], s['block_size'], model.config.vocab_size, 'cpu', seed)

    def step(k):
        x, y = batches(k)
        with amp:
            loss = model(x, y)[1]
        loss.backward()
        value = loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value
    return step


def nanogpt_step(seed):
    """
    A function that runs iteration k as nanoGPT's train.py does on a CPU, written from what it does: it opens the file
    of tokens for each batch and stacks the rows, its AdamW is fused on CUDA only, and it reads the loss at each
    logged iteration. The model's operations are those of model.py.
    """
    s = NANOGPT
    torch.manual_seed(seed)
    model = model_of(s)
    groups = [dict(params=[p for p in model.parameters() if p.dim() >= 2], weight_decay=s['weight_decay']),
              dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=s['learning_rate'], betas=(s['beta1'], s['beta2']))
    scaler, T = torch.amp.GradScaler('cpu', enabled=False), s['block_size']

    def get_batch():
        data = np.memmap(os.path.join(DATA, 'train.bin'), dtype=np.uint16, mode='r')
        starts = torch.randint(len(data) - T, (s['batch_size'],))
        return (torch.stack([torch.from_numpy(data[i + skip:i + skip + T].astype(np.int64)) for i in starts])
                for skip in (0, 1))

    def step(k):
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


def case(name, step):
    def several(first):
        for k in range(first, first + N_STEPS):
            step(k)
    return Case(dict(recipe=name), several, lambda n: n * N_STEPS, per=N_STEPS)


def steps(asked):
    """The time of an iteration: nanoGPT's, and that of each recipe in RECIPES and RATES; over: nanoGPT's over it."""
    if not os.path.exists(os.path.join(DATA, 'train.bin')):
        prepare(DATA)
    torch.set_float32_matmul_precision('high')  # as train.py does
    cases = [case("nanoGPT's loop", nanogpt_step(asked.seed))]
    cases += [case(name, our_step(settings, asked.seed)) for name, settings in RECIPES.items()]
    first, *_ = measured = take_turns(cases, asked.repeats, 'iterations')
    yield [m.row(iteration_s=m.seconds, nanogpt_over=first.over(m)) for m in measured]


def iterations_of(asked):
    """{recipe: how many iterations take as long as nanoGPT's run}, and the seconds of one, by `steps`."""
    before = read_json(asked.json).get('steps', {})
    rows = before['rows'] if before.get('machine') == describe_machine('cpu') else next(steps(asked))
    seconds = {row['recipe']: row['iteration_s'] for row in rows}
    n = asked.iterations or ITERATIONS
    return {name: (max(1, round(n * seconds["nanoGPT's loop"] / s)), s) for name, s in seconds.items()}


def train(settings, seed, iterations):
    """Train by train.py, unless that was done before. Returns the folder. ValueError if train.py fails."""
    asked = NANOGPT | settings | dict(seed=seed, max_iters=iterations, lr_decay_iters=iterations)
    changed = '-'.join(f'{name}={value}' for name, value in settings.items() if NANOGPT.get(name) != value)
    folder = os.path.join(FOLDER, f'{changed or "nanogpt"}-{seed}-{iterations}')
    path = os.path.join(folder, 'ckpt.pt')
    if not os.path.exists(path) or checkpoints.load(path)['iter_num'] < iterations:
        asked |= dict(out_dir=folder, eval_interval=max(1, iterations // CURVE), eval_iters=50, device='cpu',
                      always_save_checkpoint=True)
        command = [sys.executable, 'train.py', 'config/train_shakespeare_char.py',
                   *(f'--{name}={value}' for name, value in asked.items())]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1]}")
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


def tokens_of(settings):
    """Tokens of an iteration."""
    s = NANOGPT | settings
    return s['batch_size'] * s['block_size']


def row_of(name, settings, seeds, iterations, iteration_s):
    """
    A row: val, the loss of the whole validation text, of each seed; its mean and standard error; to_goal, the median
    seconds to GOAL; curve: iterations, and the mean losses over the seeds.
    """
    folders = [train(settings, seed, iterations) for seed in seeds]
    models = [checkpoints.build(checkpoints.load(os.path.join(f, 'ckpt.pt')), GPT, GPTConfig).eval() for f in folders]
    curves = [curve(folder) for folder in folders]
    c = models[0].config
    pieces = validation_text(c.block_size + 1).unfold(0, c.block_size + 1, c.block_size)
    val = [nats(model, pieces).mean().item() for model in models]
    error = statistics.stdev(val) / len(val) ** 0.5 if len(val) > 1 else None
    reached = [seconds_to(GOAL, *points, iteration_s) for points in curves]
    ns, losses = curves[0][0], [statistics.mean(column) for column in zip(*(losses for _, losses in curves))]
    return dict(recipe=name, settings={k: str(v) for k, v in settings.items()}, iterations=iterations,
                iteration_ms=1e3 * iteration_s, tokens=iterations * tokens_of(settings),
                val=val, mean=statistics.mean(val), standard_error=error,
                to_goal=None if None in reached else statistics.median(reached), curve=[ns, losses])


def losses(asked):
    """Each recipe in the seconds of nanoGPT's run; one change alone (+) has one seed. See `row_of`."""
    seeds = range(asked.seed, asked.seed + asked.seeds)
    for name, (iterations, iteration_s) in iterations_of(asked).items():
        if name in RECIPES:
            yield [row_of(name, RECIPES[name], seeds[:1] if name[0] == '+' else seeds, iterations, iteration_s)]


def rates(asked):
    """nanoGPT's settings and the recipe with other learning rates, one seed each, in the same seconds."""
    iterations = iterations_of(asked)
    for name, settings in RATES.items():
        yield [row_of(name, settings, [asked.seed], *iterations[name.split(',')[0]])]


def picture(figures, machine):
    """The arguments of `harness.draw`: loss by seconds and by tokens. None if `losses` was not run."""
    if 'losses' not in figures:
        return None
    rows = figures['losses']['rows']
    drawn = [row for row in rows if not row['recipe'].startswith('+')] + [
        row for row in rows if row['recipe'].startswith('+')]
    panels = []
    for title, label in (('equal seconds', 'seconds of training'), ('equal tokens', 'tokens')):
        lines = []
        for i, row in enumerate(drawn):
            ns, values = row['curve']
            unit = row['iteration_ms'] / 1e3 if label != 'tokens' else row['tokens'] / row['iterations']
            how = dict(lw=1, ls='--') if row['recipe'].startswith('+') else dict(lw=2)
            lines.append(([n * unit for n in ns], values, row['recipe'], dict(how, color=f'C{i % 10}')))
        panels.append(Panel(title, lines, axes=dict(xlabel=label, ylabel='validation loss, nats a character',
                                                    ylim=(1.5, 2.6))))
    n_seeds = len(rows[0]['val'])
    return dict(panels=panels, title=f"{figures['losses']['machine']}; seeds: {n_seeds}", size=(7, 5))


COLUMNS = 'recipe iterations iteration_ms tokens mean standard_error val to_goal'
PARTS = dict(
    steps=Part(steps, 1, "an iteration", 'recipe iteration_s nanogpt_over'),
    rates=Part(rates, 20, "learning rates of both sides, one seed", COLUMNS),
    losses=Part(losses, 75, "each recipe in the same seconds", COLUMNS),
)
