"""How well a model, a decoder and a policy for full contexts predict a text: what rounding weights or dropping context costs."""
import torch
import torch.nn.functional as F
from tqdm import tqdm

import decode
import kvcache
from model import Context, as_int64, cut_of
from whole_file import replacing


@torch.inference_mode()
def negative_log_likelihoods(model, tokens, decoder=None, when_full='crop', keep=None, n_keep=0, skip=0):
    """
    Read tokens (B, T) as `stream` would have drawn them, and return (nll, context), (T - 1 - skip, B) and (T - 1 - skip,).

    nll: in nats, of each token from number 1 + skip on, given the context that generation would have had for it;
    context: how many tokens that was. decoder, when_full, keep, n_keep: as in `GPT.stream`, for prompts of one token.
    """
    tokens, block_size = as_int64('tokens', tokens), model.config.block_size
    cut = cut_of(1, block_size, when_full, keep, n_keep)
    context = Context(list(tokens[:, :1]), 1, block_size, True, [cut] * len(tokens))
    nll, lengths = [], []
    for t in tqdm(range(1, tokens.size(1)), desc=f'{when_full}, {decoder.name if decoder else "eager"}', leave=False, disable=None):
        logits = context.logits(decoder or model.feed)[:, 0]
        if t > skip:
            nll.append(F.cross_entropy(logits.float(), tokens[:, t], reduction='none'))
            lengths.append(context.length)
        context.append(tokens[:, t:t + 1])
    return torch.stack(nll), torch.tensor(lengths)


@torch.inference_mode()
def loss_by_context(model, text):
    """The mean nats a token of text (N,) with 1, 2, ... block_size tokens of context: (block_size,), of 16 pieces of the text."""
    size = model.config.block_size
    n = min(1024, (len(text) - size) // 16)
    # of a piece each offset: any stride would give different tokens to different contexts
    pieces, offsets, window = (torch.arange(length, device=text.device) for length in (16, n, size + 1))
    starts = (pieces[:, None] * ((len(text) - size) // 16) + offsets).flatten()
    windows = text[starts[:, None] + window]
    losses = [F.cross_entropy(model(w[:, :-1], w[:, 1:])[0].transpose(1, 2).float(), w[:, 1:], reduction='none') for w in windows.split(64)]
    return torch.cat(losses).mean(dim=0)


def compare(model, text, n_rows=32):
    """
    What each policy and each width of weights, and of keys and values, costs on a text (N,), cut into n_rows: rows as dicts, all on
    the same tokens.

    The first block_size tokens of each row are not scored: until then nothing is full. difference: to float32 and crop,
    with the standard error of its mean over the rows, in nats.
    """
    size = model.config.block_size
    n_rows = max(1, min(n_rows, len(text) // (4 * size)))
    tokens = text[:len(text) // n_rows * n_rows].view(n_rows, -1)[:, :1000 + size]
    results, reference = [], None
    float_bytes = sum(t.nbytes for layer in model.empty_cache(1) for t in layer[:2])
    shift = dict(when_full='shift')
    cases = (('float32', 0, {}), ('float32', 0, shift), ('float32', 0, shift | dict(keep=3 * size // 4)),
             ('float32', 0, shift | dict(keep=size // 4)), ('bfloat16', 0, {}), ('int8', 0, {}),
             ('float32', 8, {}), ('float32', 4, {}))
    for weights, kv_bits, policy in tqdm(cases, desc='policies and widths', leave=False, disable=None):
        decoder = kvcache.CacheDecoder(model, 'tuple', n_rows, kv_bits) if kv_bits else decode.best(model, n_rows, weights)
        nll, context = negative_log_likelihoods(model, tokens, decoder, skip=size, **policy)
        nll = nll.double()
        reference = nll if reference is None else reference
        difference = (nll - reference).mean(dim=0)
        n_bytes = decoder.system.nbytes() if kv_bits else n_rows * float_bytes
        results.append(dict(weights=weights, kv_bits=kv_bits, kv_bytes_a_token=n_bytes // (n_rows * size), when_full=policy.get('when_full', 'crop'),
                            keep=policy.get('keep', size // 2) if policy else size, tokens=nll.numel(),
                            mean_context=context.double().mean().item(), nll=nll.mean().item(), difference=difference.mean().item(),
                            standard_error=difference.std().item() / n_rows ** 0.5))
    return results


def draw(by_context, results, path):
    """Loss against context in use, and where the policies stand on it."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    fig, ax = plt.subplots(figsize=(7, 4.8), layout='constrained')
    ax.plot(range(1, len(by_context) + 1), by_context, label='a token, by how many the model sees before it')
    for i, row in enumerate(row for row in results if (row['weights'], row['kv_bits']) == ('float32', 0)):
        what = 'crop' if row['when_full'] == 'crop' else f"shift, keep {row['keep']}"
        ax.plot([row['keep'], len(by_context)], [row['nll']] * 2, color=f'C{i + 1}', marker='o', ms=4, label=f"{what}: {row['nll']:.4f}")
    ax.set(xlabel='tokens of context in use (a line spans what a policy has, at the mean loss it reaches)', ylabel='nats a token')
    ax.set_ylim(min(by_context) - 0.02, by_context[min(4, len(by_context) - 1)])
    ax.grid(alpha=0.3)
    fig.legend(loc='outside lower center', ncols=2, fontsize=9)
    with replacing(path) as f:
        fig.savefig(f, format='png', dpi=110)
    plt.close(fig)
