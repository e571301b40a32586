"""
How well a trained model predicts a text when weights, or keys and values, have fewer bits: the cost in nats a token.

llama.cpp is compared with its own numbers, if it is installed and can have the model.
"""
import torch
import torch.nn.functional as F
from tqdm import tqdm

from benchmarks.harness import Part
from benchmarks.ours import Ours, log_likelihoods
from benchmarks.peers.llamacpp import LlamaCpp
from benchmarks.shapes import label, trained
from tokenizer import read_text

CPU_ONLY = "losses are measured"
MOST = 2**15  # tokens of the text
CASES = [  # (engine, weights, keys and values)
    *((Ours, weights, 'float32') for weights in Ours.ways), (Ours, 'float32', 'int8'),
    *((LlamaCpp, weights, 'float32') for weights in LlamaCpp.ways)]


def bits(asked):
    model, tokenizer = trained(asked.init_from or 'resume')
    text = torch.tensor(tokenizer.encode('\n'.join(map(read_text, asked.text.split(','))))[:MOST])
    if len(text) <= 2 * (size := piece_size(model.config)):  # a standard error needs two pieces
        raise ValueError(f"the text has {len(text):,} tokens, and two pieces take {2 * size + 1:,}: give a longer one")
    yield [dict(model=label(asked.init_from), **row) for row in compare_bits(model, text)]


def piece_size(config):
    return config.window + 1 if config.window else config.block_size


@torch.inference_mode()
def compare_bits(model, text):
    """
    A row for each of CASES: the loss of a text (N,). The text is cut into pieces of block_size tokens, or of
    window + 1, and each token is predicted from those before it in its piece. difference: to the loss of our float32,
    in nats, with the standard error of its mean over the pieces; percent: of our float32.
    """
    rows, reference, size = [], None, piece_size(model.config)
    pieces = text.unfold(0, size + 1, size)  # the last token of a piece is the first of the next
    for engine, weights, kv in tqdm(CASES, desc='bits', leave=False, disable=None):
        try:
            if why := engine.missing():
                raise ValueError(why)
            score = score_by(engine, model, weights, kv)
        except ValueError as e:
            tqdm.write(f"not compared: {engine.name}, {weights} ({e})")
            continue
        nll = -torch.stack([score(piece).mean() for piece in pieces])
        reference = nll if reference is None else reference
        difference = nll - reference
        rows.append(dict(engine=engine.name, weights=weights, kv=kv, tokens=len(pieces) * size, nll=nll.mean().item(),
                         difference=difference.mean().item(),
                         standard_error=difference.std().item() / len(pieces) ** 0.5,
                         percent=100 * (difference.mean() / reference.mean()).item()))
    return rows


def score_by(engine, model, weights, kv):
    """A function of a piece (n + 1,): the log probabilities of all of its tokens but the first, float64 (n,)."""
    if engine is Ours:
        score = log_likelihoods(model, weights, 8 if kv == 'int8' else 0)
        return lambda piece: score([(piece[:1].tolist(), piece[1:].tolist())])[0]
    theirs = engine(model, weights, kv=kv)
    return lambda piece: -F.cross_entropy(theirs.all_logits(piece[:-1]), piece[1:], reduction='none').double()


PARTS = dict(bits=Part(bits, 3, "numbers in fewer bits; llama.cpp's int8 is q8_0, its int4 q4_0",
                       'model engine weights kv tokens nll difference standard_error percent'))
