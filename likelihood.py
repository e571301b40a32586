"""How well a model, a decoder and a policy for full contexts predict a text: what rounding weights or dropping context costs."""
import torch
import torch.nn.functional as F
from tqdm import tqdm

from model import Context


@torch.inference_mode()
def negative_log_likelihoods(model, tokens, decoder=None, when_full='crop', keep=None, n_keep=0, skip=0):
    """
    Read tokens (B, T) as `stream` would have drawn them, and return (nll, context), (T - 1 - skip, B) and (T - 1 - skip,).

    nll: in nats, of each token from number 1 + skip on, given the context that generation would have had for it;
    context: how many tokens that was. decoder, when_full, keep, n_keep: as in `GPT.stream`.
    """
    block_size = model.config.block_size
    keep = block_size if when_full == 'crop' else keep or block_size // 2
    context = Context(list(tokens[:, :1]), 1, block_size, True, keep, n_keep)
    nll, lengths = [], []
    for t in tqdm(range(1, tokens.size(1)), desc=f'{when_full}, {decoder.name if decoder else "eager"}', leave=False, disable=None):
        logits = context.logits(decoder or model.feed)[:, 0]
        if t > skip:
            nll.append(F.cross_entropy(logits.float(), tokens[:, t], reduction='none'))
            lengths.append(context.length)
        context.append(tokens[:, t:t + 1])
    return torch.stack(nll), torch.tensor(lengths)
