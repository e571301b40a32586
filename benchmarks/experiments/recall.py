"""
What a model with a window remembers, by distance: a task in which a token has to be recalled from far back.

    python bench.py --mode=recall

A text is noise, with one marked token in it. At each later position the model has to say which one it was. With a
window of W tokens one layer passes it on over W - 1 positions, so n_layer layers reach n_layer * (W - 1) positions
back, and none further. S (4 layers of 128 channels) is trained with a window of 32, the same with sinks, and without.
"""
import statistics

import torch
from tqdm import tqdm

from benchmarks.harness import Panel, Part
from model import GPT, GPTConfig

PICTURE, CPU_ONLY = 'recall.png', "the models are trained and measured"
MARKED, NOISE = 16, 16  # symbols of each kind
N_LAYER, WINDOW, BLOCK_SIZE, FARTHEST = 4, 32, 256, 190  # farthest: the largest distance that is measured
MODELS = {'window 32': dict(window=WINDOW), 'window 32, 4 sinks': dict(window=WINDOW, n_sink=4), 'no window': {}}


def texts(n, length, place, generator):
    """
    n random texts of noise with a marked token in each: tokens and targets, int64 (n, length).

    place: the position of the marked token in each text, int64 (n,). The target is the marked token from its own
    position on, and before it -1, which is not scored.
    """
    tokens = torch.randint(MARKED, MARKED + NOISE, (n, length), generator=generator)
    marked = torch.randint(MARKED, (n, 1), generator=generator)
    tokens.scatter_(1, place[:, None], marked)
    return tokens, torch.where(torch.arange(length) >= place[:, None], marked, -1)


def train(config, iterations, seed, batch_size=16):
    """
    A model that was trained on the task. The marked token is one of the first 32. The farthest distance that is scored
    grows from 8 to 200, because from far targets alone a model learns nothing at first.
    """
    torch.manual_seed(seed)
    model, generator = GPT(config), torch.Generator().manual_seed(seed)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), 'cpu')
    what = f'window {config.window}, {config.n_sink} sinks' if config.window else 'no window'
    for k in tqdm(range(iterations), desc=what, leave=False, disable=None):
        for group in optimizer.param_groups:
            group['lr'] = 1e-3 * min(1, (k + 1) / 30)
        place, farthest = torch.randint(32, (batch_size,), generator=generator), 8 + 192 * k // iterations
        tokens, targets = texts(batch_size, 32 + farthest, place, generator)
        too_far = torch.arange(tokens.size(1)) - place[:, None] > farthest
        loss = model(tokens, targets.masked_fill(too_far, -1))[1]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


@torch.inference_mode()
def accuracy(model, place, farthest, n, seed):
    """
    The fraction of n texts in which the marked token, at position `place`, is recalled from 0, 1, ... `farthest`
    positions on, as a list. A model with a window reads the texts through its cache.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = texts(n, place + farthest + 1, torch.full((n,), place), generator)
    logits = model(tokens, targets, kv_cache=model.empty_cache(n) if model.config.window else None)[0]
    return (logits.argmax(-1) == targets)[:, place:].double().mean(dim=0).tolist()


def recalled(asked, n=256, far=600):
    """
    Of a model and the position of the marked token (`place`) the accuracy at each distance over n texts, and its means
    up to a distance of WINDOW - 1, from there to n_layer * (WINDOW - 1), and beyond.

    A model with a window is also measured at position `far`, beyond all that it was trained on, and one with sinks also
    with a sink as the marked token.
    """
    rows, reach, iterations = [], N_LAYER * (WINDOW - 1), asked.iterations or 500
    for name, more in MODELS.items():
        config = GPTConfig(block_size=BLOCK_SIZE, vocab_size=MARKED + NOISE, n_layer=N_LAYER, n_head=4, n_embd=128,
                           bias=False, position='rope', **more)
        model = train(config, iterations, asked.seed)
        for place in [16] + [far] * (config.window > 0) + [1] * (config.n_sink > 0):
            fractions = accuracy(model, place, FARTHEST, n, asked.seed + 1)
            rows.append(dict(model=name, iterations=iterations, place=place,
                             within_window=statistics.mean(fractions[1:WINDOW]),
                             within_reach=statistics.mean(fractions[WINDOW:reach + 1]),
                             beyond=statistics.mean(fractions[reach + 1:]), accuracy=fractions))
    yield rows


def picture(figures, machine):
    """Accuracy by distance, a strip for each model and place."""
    strips = {f"{row['model']}, marked token at {row['place']}": row['accuracy'] for row in figures['recalled']['rows']}
    marks = {x + 0.5: f'{what} = {x}' for x, what in ((WINDOW - 1, 'W - 1'), (N_LAYER * (WINDOW - 1),
                                                                             'n_layer * (W - 1)'))}
    return dict(panels=[Panel('recalled (blue) or not (white)', image=strips, marks=marks,
                              axes=dict(xlabel='distance to the marked token'))], size=(8.5, 0.8 + 0.4 * len(strips)))


PARTS = dict(recalled=Part(recalled, 10, "the part of the texts in which the marked token is recalled",
                           'model place within_window within_reach beyond'))
