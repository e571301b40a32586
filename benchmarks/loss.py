"""
How well a model predicts a text when context is dropped, or weights or the cache are rounded: the cost in nats a token.

    python bench.py --mode=loss

The model is the newest out*/ckpt.pt, the text the validation split of its data set. The part `weights` takes all
out*/ckpt.pt, one after the other.
"""
import os

import torch
import torch.nn.functional as F
from tqdm import tqdm

import checkpoint as checkpoints
import decode
import kvcache
import model as gpt
from benchmarks.harness import Panel, Part
from benchmarks.peers.llamacpp import LlamaCpp
from benchmarks.peers.ours import Pages
from generation import advance, make_sequences
from inputs import as_int64
from kvcache.contiguous import cache_for
from training.batches import Batches

PICTURE, CPU_ONLY = 'loss_by_context.png', "losses are measured"


def paths():
    """Those of all checkpoints, the newest first; without any, of one that is missing, so that loading says so."""
    return checkpoints.newest_first() or ['out/ckpt.pt']


def model_and_text(asked, path=''):
    """(the model of a checkpoint, by default the newest, its validation text, int64 (N,)). ValueError without one."""
    path = path or paths()[0]
    checkpoint = checkpoints.load(path)
    model = checkpoints.build(checkpoint, gpt.GPT, gpt.GPTConfig).eval()
    data_dir = 'data/' + checkpoint['config']['dataset']
    text = Batches(data_dir, 'val', 1, model.config.block_size, model.config.vocab_size, asked.device).tokens
    print(f"{path} on {data_dir}/val.bin, window {model.config.block_size}")
    return model, torch.from_numpy(text.astype('int64'))


def policies(asked):
    yield compare(*model_and_text(asked))


def by_context(asked):
    yield [dict(nats=loss_by_context(*model_and_text(asked)).tolist())]


@torch.inference_mode()
def nats(model, rows):
    """
    The loss of each token of rows (B, T + 1), given all tokens of its row before it: (B, T).

    A model whose positions do not end reads rows of any length. What exceeds its window goes through its cache.
    """
    losses, T = [], rows.size(1) - 1
    rolling = 0 < model.config.window < T
    for part in rows.split(max(1, min(2**22 // T**2, 2**28 // (T * model.config.vocab_size)))):
        x, y = part[:, :-1], part[:, 1:]
        logits = model(x, y, kv_cache=model.empty_cache(len(x)) if rolling else None)[0]
        losses.append(F.cross_entropy(logits.transpose(1, 2), y, reduction='none'))
    return torch.cat(losses)


@torch.inference_mode()
def negative_log_likelihoods(model, tokens, cache=None, when_full='crop', keep=None, n_keep=0, skip=0):
    """
    The loss of each token of tokens (B, T), given the context that `generation.stream` would have had for it.

    Returns (nll, context), (T - 1 - skip, B) and (T - 1 - skip,). nll: in nats, of the tokens from number 1 + skip on.
    context: how many tokens came before. cache: one of kvcache/; by default the model with its tuples.
    when_full, keep, n_keep: as in `stream`, for prompts of one token.
    """
    cache, tokens = cache or cache_for(model, len(tokens)), as_int64('tokens', tokens)
    sequences = make_sequences(model, tokens[:, :1], when_full=when_full, keep=keep, n_keep=n_keep)
    for sequence in sequences:
        sequence.handle = cache.new()
    nll, lengths = [], []
    for t in tqdm(range(1, tokens.size(1)), desc=f'{when_full}, {cache.name}', leave=False, disable=None):
        logits = advance(sequences, cache, tokens.device)
        if t > skip:
            nll.append(F.cross_entropy(logits.float(), tokens[:, t], reduction='none'))
            lengths.append(sequences[0].length)
        for sequence, token in zip(sequences, tokens[:, t].tolist()):
            sequence.append(token)
    for sequence in sequences:
        cache.free(sequence.handle)
    return torch.stack(nll), torch.tensor(lengths)


def loss_by_context(model, text):
    """
    The mean loss in nats of a token of text (N,) that has 1, 2, ... block_size tokens of context: (block_size,).

    Means over 16 pieces of the text. Of each piece every offset is used, so that all contexts predict the same tokens.
    """
    size = model.config.block_size
    n = min(1024, (len(text) - size) // 16)
    pieces, offsets, window = (torch.arange(length, device=text.device) for length in (16, n, size + 1))
    starts = (pieces[:, None] * ((len(text) - size) // 16) + offsets).flatten()
    return nats(model, text[starts[:, None] + window]).mean(dim=0)


def compare(model, text, n_rows=32):
    """
    The loss of a text (N,), cut into n_rows rows, with each policy for full contexts and each width of numbers.

    Returns a dict a case, all on the same tokens. The first block_size tokens of each row are not scored: until then no
    context is full. difference: to float32 and crop, in nats, with the standard error of its mean over the rows.
    """
    size = model.config.block_size
    n_rows = max(1, min(n_rows, len(text) // (4 * size)))
    tokens = text[:len(text) // n_rows * n_rows].view(n_rows, -1)[:, :1000 + size]
    results, reference = [], None
    shift = dict(when_full='shift')
    cases = (('float32', 0, {}), ('float32', 0, shift), ('float32', 0, shift | dict(keep=3 * size // 4)),
             ('float32', 0, shift | dict(keep=size // 4)), ('bfloat16', 0, {}), ('int8', 0, {}),
             ('int4', 0, {}), ('float32', 8, {}), ('float32', 4, {}))
    for weights, kv_bits, policy in tqdm(cases, desc='policies and widths', leave=False, disable=None):
        cache = kvcache.make_cache(model, 'tuple', n_rows, kv_bits, decode.best(model, n_rows, weights))
        nll, context = negative_log_likelihoods(model, tokens, cache, skip=size, **policy)
        nll = nll.double()
        reference = nll if reference is None else reference
        difference = (nll - reference).mean(dim=0)
        results.append(dict(
            weights=weights, kv_bits=kv_bits, kv_bytes_a_token=cache.nbytes() // (n_rows * size),
            when_full=policy.get('when_full', 'crop'), keep=policy.get('keep', size // 2) if policy else size,
            tokens=nll.numel(), mean_context=context.double().mean().item(), nll=nll.mean().item(),
            difference=difference.mean().item(), standard_error=difference.std().item() / n_rows ** 0.5))
    return results


def weights(asked):
    for path in paths():
        rows = compare_weights(*model_and_text(asked, path))
        yield [dict(model=os.path.dirname(path), **row) for row in rows]


@torch.inference_mode()
def compare_weights(model, text, n_most=2**15):
    """
    The loss of a text (N,), of at most n_most tokens, with weights in fewer bits: in our decoder, and in llama.cpp, if
    it is installed and can have them. llama.cpp too keeps keys and values in float32 here.

    The text is cut into rows of block_size tokens, or of window + 1, and each is predicted from those before it in its
    row. Returns a dict a case. difference: to our float32, in nats, with the standard error of its mean over the rows;
    percent: of our float32.
    """
    c, results, reference = model.config, [], None
    size = c.window + 1 if c.window else c.block_size
    rows = text[:n_most].unfold(0, size + 1, size)  # the last token of a row is the first of the next
    cases = [(Pages, width) for width in decode.WEIGHTS] + [(LlamaCpp, width) for width in LlamaCpp.ways]
    for engine, width in tqdm(cases, desc='weights', leave=False, disable=None):
        try:
            if why := engine.missing():
                raise ValueError(why)
            all_logits = engine(model, width, 1, 'float32').all_logits
        except ValueError as e:
            tqdm.write(f"not compared: {engine.name}, {width} ({e})")
            continue
        nll = torch.stack([F.cross_entropy(all_logits(row[:-1]), row[1:]) for row in rows]).double()
        reference = nll if reference is None else reference
        difference = nll - reference
        results.append(dict(
            engine='ours' if engine is Pages else engine.name, weights=width, tokens=len(rows) * size,
            nll=nll.mean().item(), difference=difference.mean().item(),
            standard_error=difference.std().item() / len(rows) ** 0.5,
            percent=100 * (difference.mean() / reference.mean()).item()))
    return results


def picture(figures, machine):
    """Loss against the tokens of context, and a line for each policy at its mean loss."""
    if not {'policies', 'by_context'} <= set(figures):
        return None
    by_context, = (row['nats'] for row in figures['by_context']['rows'])
    n = len(by_context)
    lines = [(range(1, n + 1), by_context, 'a token, by the number of tokens before it', {})]
    for row in figures['policies']['rows']:
        if (row['weights'], row['kv_bits']) == ('float32', 0):
            what = 'crop' if row['when_full'] == 'crop' else f"shift, keep {row['keep']}"
            lines.append(([row['keep'], n], [row['nll']] * 2, f"{what}: {row['nll']:.4f}", dict(marker='o', ms=4)))
    return dict(panels=[Panel('', lines, axes=dict(
        xlabel='tokens of context (a line spans the contexts of a policy, at its mean loss)', ylabel='nats a token',
        ylim=(min(by_context) - 0.02, by_context[min(4, n - 1)])))], size=(7, 4.8))


PARTS = dict(
    policies=Part(policies, 4, "policies for a full context, and numbers in fewer bits", (
        'weights kv_bits kv_bytes_a_token when_full keep tokens mean_context nll difference standard_error')),
    weights=Part(weights, 3, "weights in fewer bits, of each checkpoint; llama.cpp's int8 is q8_0, its int4 q4_0",
                 'model engine weights tokens nll difference standard_error percent'),
    by_context=Part(by_context, 1, "nats a token, by the number of tokens before it", 'nats'),
)
