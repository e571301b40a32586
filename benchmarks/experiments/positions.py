"""
The loss of one small model with each kind of positions and windows, trained on tinyshakespeare.

    python bench.py --mode=positions

Trains S (4 layers of 128 channels, block_size 64) with each of MODELS for 2,000 iterations, by train.py, in a folder of
its own; models that are trained already are not trained again. Measures, in nats a character of the validation text:
the loss within block_size, by position far past it, of all of the text as one stream, and of a model that was trained
without a window and is cut to one. Speed and memory are measured by endless.py.
"""
import os

import torch
import torch.nn.functional as F
from tqdm import tqdm

from benchmarks.harness import Panel, Part
from benchmarks.loss import nats
from benchmarks.shapes import cache_bytes
from benchmarks.trained import load_trained, train_once
from training.batches import open_tokens, prepare

PICTURE, CPU_ONLY = 'positions.png', "the models are trained and measured"
DATA = os.path.join('data', 'shakespeare_char')

FOLDER = os.path.join('out-bench', 'positions')  # not out*/ckpt.pt, where sample.py looks for the newest model
MODELS = {
    'learned': {},
    'rope': dict(position='rope'),
    'alibi': dict(position='alibi'),
    'none': dict(position='none'),
    'rope, 2 kv heads': dict(position='rope', n_kv_head=2),
    'rope, 1 kv head': dict(position='rope', n_kv_head=1),
    'rope, window 32': dict(position='rope', window=32),
    'rope, window 32, 4 sinks': dict(position='rope', window=32, n_sink=4),
}
# the README's command for a CPU, with the last model kept and not the one that did best on a few batches
COMMON = dict(device='cpu', block_size=64, batch_size=12, n_layer=4, n_head=4, n_embd=128, dropout=0.0,
              learning_rate=3e-3, min_lr=1e-4, warmup_iters=100, eval_iters=20)
CUTS = [(window, n_sink) for window in (32, 60) for n_sink in (0, 1, 4)]  # of the rope model that has no window
EDGES = (0, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # of bins of positions
ITERATIONS = 2000  # of the training of each
STRIDE = 4  # every so many tokens of a stream count
STRETCHES = 32  # pieces of the validation text, of EDGES[-1] + 1 characters


def folder_of(name, seed):
    return os.path.join(FOLDER, f"{name.replace(', ', '-').replace(' ', '_')}-{seed}")


def train(name, seed, iterations):
    """Train a model of MODELS by `train_once`. Returns its folder."""
    folder = folder_of(name, seed)
    train_once(folder, COMMON | MODELS[name] | dict(seed=seed, max_iters=iterations, lr_decay_iters=iterations,
                                                    eval_interval=iterations))
    return folder


def load(name, seed):
    """A trained model, in eval mode."""
    return load_trained(folder_of(name, seed))


def validation_text(least):
    """The token ids of the validation text, int64 (N,). ValueError if it has fewer than `least` characters."""
    if not os.path.exists(os.path.join(DATA, 'val.bin')):
        prepare(DATA)
    text = torch.from_numpy(open_tokens(DATA, 'val', 1).astype('int64'))
    if len(text) < least:
        raise ValueError(f"the validation text of {DATA} has {len(text):,} characters, and {least:,} are needed: "
                         "prepare tinyshakespeare")
    return text


@torch.inference_mode()
def cropped_nats(model, rows, stride):
    """
    The loss of the tokens block_size, block_size + stride, ... of rows (B, T + 1), given the block_size tokens before,
    each in a pass of its own, as when_full='crop' computes them: (B, n).
    """
    losses, windows = [], rows.unfold(1, model.config.block_size + 1, stride)
    for part in windows.flatten(0, 1).split(256):
        logits = model(part[:, :-1], use_cache=False)[0]
        losses.append(F.cross_entropy(logits[:, -1], part[:, -1], reduction='none'))
    return torch.cat(losses).view(len(rows), -1)


def binned(losses, contexts):
    """
    The mean of losses (B, n) in each bin of EDGES, as a list; None where a bin is empty.

    contexts: int64 (n,), the number of tokens before each; bin i has those in EDGES[i] + 1 ... EDGES[i + 1].
    """
    bins = torch.bucketize(contexts, torch.tensor(EDGES)) - 1
    return [losses[:, bins == i].mean().item() if (bins == i).any() else None for i in range(len(EDGES) - 1)]


def by_position(model, stretches, crop=False):
    """
    The loss in nats in each bin of EDGES, on stretches (B, EDGES[-1] + 1). Learned positions end at block_size. With
    crop only beyond block_size, where the model gets the last block_size tokens for each token.
    """
    size = model.config.block_size
    if crop:
        return binned(cropped_nats(model, stretches[:, 1:], 1), torch.arange(size + 1, stretches.size(1)))
    if model.config.position == 'learned':
        stretches = stretches[:, :size + 1]
    elif not model.config.window:  # positions beyond block_size: this window hides nothing of the stretches
        model = model.with_window(EDGES[-1])
    return binned(nats(model, stretches), torch.arange(1, stretches.size(1)))


def stream_nats(model, text, stride, crop=False):
    """
    The losses of every stride-th token of text (N,) that has a full context, (n,). The text is one stream: the model's
    window rolls over it, or with crop the model gets the last block_size tokens.
    """
    if crop:
        return cropped_nats(model, text[None], stride)[0]
    return nats(model, text[None])[0, model.config.block_size - 1::stride]


@torch.inference_mode()
def attention_to_the_first(model, rows):
    """
    The part of the attention that the first key gets from the second half of rows (B, T), mean over them, for each
    layer a list of its heads. For a model with rotary positions and without a window.
    """
    shares, T = [], rows.size(1)

    def look(attn, args):
        x, pos = args[:2]
        q, k = (pos.rotated(heads) for heads in attn.c_attn(x).unflatten(2, (-1, attn.head_dim)).transpose(1, 2).split(
            [attn.n_head, attn.n_kv_head, attn.n_kv_head], dim=1)[:2])
        scores = q @ k.repeat_interleave(attn.n_head // attn.n_kv_head, dim=1).transpose(2, 3) * attn.head_dim ** -0.5
        scores.masked_fill_(~torch.ones(T, T, dtype=torch.bool).tril(), -float('inf'))
        shares.append(scores.softmax(-1)[:, :, T // 2:, 0].mean(dim=(0, 2)).tolist())
    hooks = [block.attn.register_forward_pre_hook(look) for block in model.transformer.h]
    model(rows, rows)  # with targets, so that the last layer computes all positions
    for hook in hooks:
        hook.remove()
    return shares


def mean(values):
    """The mean of lists of equal lengths, element by element; None stays None."""
    return [None if column[0] is None else sum(column) / len(column) for column in zip(*values)]


def trained(asked, names, n_seeds):
    """Yields (name, models, one for each seed) of these of MODELS. Those that are missing are trained first."""
    seeds = range(asked.seed, asked.seed + n_seeds)
    for seed in seeds:
        for name in names:
            train(name, seed, asked.iterations or ITERATIONS)
    for name in tqdm(names, desc='positions', leave=False, disable=None):
        yield name, [load(name, seed) for seed in seeds]


def ways_beyond(name, models):
    """{how the context goes on past block_size: the models that read so}, of models of one name."""
    if models[0].config.window:
        return {'the window rolls': models}
    ways = {'crop': models} if name in ('learned', 'rope') else {}
    if name == 'rope':
        ways |= {f"window {window}, {n_sink} sink{'s' * (n_sink != 1)}":
                 [model.with_window(window, n_sink) for model in models] for window, n_sink in CUTS}
    return ways


def losses(asked):
    """
    A row for each model as it was trained, and one for each way in which its context goes on (`how`).

    cache_bytes: of a sequence. val: the loss within block_size; stream: that of the validation text as one stream, of
    which every STRIDE-th token counts; a number a seed each. by_10000: the means of 10,000 tokens each of the first
    seed's stream. far_past: the loss in each bin of EDGES, mean over the seeds. The rope model's row has also
    `attention_to_the_first`.
    """
    text = validation_text(EDGES[-1] + STRETCHES)
    stretches = text.unfold(0, EDGES[-1] + 1, (len(text) - EDGES[-1] - 1) // (STRETCHES - 1))[:STRETCHES]
    for name, models in trained(asked, MODELS, asked.seeds):
        c = models[0].config
        pieces = text.unfold(0, c.block_size + 1, c.block_size)
        rows = [dict(model=name, how='', parameters=models[0].get_num_params(non_embedding=False),
                     cache_bytes=cache_bytes(c, 1), val=[nats(model, pieces).mean().item() for model in models],
                     far_past=mean([by_position(model, stretches) for model in models]))]
        if name == 'rope':
            rows[0]['attention_to_the_first'] = attention_to_the_first(models[0], pieces[:256, :-1])
        for how, models_of_way in ways_beyond(name, models).items():
            along = [stream_nats(model, text, STRIDE, how == 'crop') for model in models_of_way]
            rows.append(dict(model=name, how=how, stream=[nats_of.mean().item() for nats_of in along],
                             by_10000=[part.mean().item() for part in along[0].split(10000 // STRIDE)]))
            if how.startswith('window') or (name, how) == ('learned', 'crop'):
                rows[-1]['far_past'] = mean([by_position(model, stretches, how == 'crop') for model in models_of_way])
        yield rows


def picture(figures, machine):
    """Loss by position: of the models, and of the rope model cut to windows."""
    middles = [(low + 1 + high) / 2 for low, high in zip(EDGES, EDGES[1:])]
    rows = [row for row in figures['losses']['rows'] if 'far_past' in row]
    cut = [line for line in rows if line['how'].startswith('window')]
    of_models = [line for line in rows if line not in cut]
    trained_so = [line for line in of_models if 'window' in line['model']]
    panels = []
    for shown, dashed, title in ((of_models, [line for line in of_models if line['how']], 'used as they were trained'),
                                 (cut + trained_so, trained_so, 'trained without a window, and cut to one')):
        lines = []
        for line in shown:
            label = ', '.join(filter(None, ('trained so' * (line in trained_so) * (shown is not of_models),
                                            line['model'], line['how'])))
            points = [(x, y) for x, y in zip(middles, line['far_past']) if y is not None]
            lines.append((*zip(*points), label, dict(marker='.', ls='--' if line in dashed else '-')))
        panels.append(Panel(title, lines, marks={64.5: 'block_size'}, axes=dict(
            xscale='log', xticks=[1, 4, 16, 64, 256, 1024], xlabel='tokens before the predicted one',
            ylabel='nats a character')))
    return dict(panels=panels, size=(6, 5.5))


PARTS = dict(losses=Part(losses, 190, "nats a character: within block_size, and of one stream",
                         'model how parameters cache_bytes val stream'))
