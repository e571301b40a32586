"""
The next token of each sequence, drawn from its logits. `draw` is the definition; decode/kernel/sampling.py and
decode/gpu/drawing.py are compiled twins of it.

A draw takes the largest of weight / noise, where the noise is exponential: that draws token i with probability
weight i / sum of weights (the Gumbel-max trick in another form, as `model.sample_token` does it). The noise is a hash
of the seed of a sequence, of how many tokens it has drawn before, and of the token id. So a sequence draws the same
tokens in any batch, on any device, and when it is computed again; and models that differ by rounding draw the same
tokens, except where the two largest are nearly equal.
"""
import copy
import math

import numpy as np
import torch

from inputs import check_sampling

DEFAULTS = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0,
                repetition_penalty=1.0)
SETTING_NAMES = tuple(DEFAULTS)  # columns of the settings of a sequence, in this order
GOLDEN, MULTIPLIERS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64
LEAST_WEIGHT = -87.0  # weights below e ** -87 of the largest are 0


class DrawSettings:
    """
    How one sequence draws.

    values: the numbers of SETTING_NAMES. temperature divides the logits, 0 takes the largest. top_k keeps the k largest
    and ties with the k-th, 0 keeps all. min_p keeps those with at least this share of the largest probability. top_p
    keeps the fewest that hold this much probability. presence_penalty is subtracted once from the logit of a token that
    was drawn, frequency_penalty once for each time that it was drawn. repetition_penalty divides the positive logits of
    all tokens of the sequence, and multiplies the negative ones.
    seed: of the noise. stop_ids: tokens that end the sequence, ascending; they are not drawn before min_tokens others.
    logit_bias: {token: what is added to its logit}, kept as bias_tokens and biases, int64 and float64 (n,).
    allowed: None, or a bitmap, int64 (vocab_size // 64 + 1,): only tokens t whose bit t % 64 of number t // 64 is 1
    are drawn. Whoever constrains the sequence writes it before each draw, in place.
    penalised: does it have penalties? Then it has, from its first draw on: counts, int64 (vocab_size,), how often each
    token was drawn; in_prompt, uint8 (vocab_size,), 1 for the tokens in `prompt`, a list.
    """
    __slots__ = ('vocab_size', 'values', 'seed', 'stop_ids', 'min_tokens', 'bias_tokens', 'biases', 'penalised',
                 'prompt', 'counts', 'in_prompt', 'allowed')

    def __init__(self, vocab_size, seed=0, stop_ids=(), min_tokens=0, logit_bias=(), prompt=(), **values):
        if unknown := values.keys() - DEFAULTS.keys():
            raise ValueError(f"there is no setting {', '.join(sorted(unknown))}: a draw has {', '.join(SETTING_NAMES)}")
        values = DEFAULTS | values
        values['top_p'] = 1.0 if values['top_p'] is None else values['top_p']
        check_values(**values)
        values['top_k'] = min(max(values['top_k'] or 0, 0), vocab_size)
        self.values = tuple(float(values[name]) for name in SETTING_NAMES)
        if not isinstance(seed, (int, np.integer)):
            raise ValueError(f"seed must be an integer, not {seed!r}")
        stop_ids, biases = [*stop_ids], dict(logit_bias)
        for token in (*stop_ids, *biases):
            if not isinstance(token, (int, np.integer)) or not 0 <= token < vocab_size:
                raise ValueError(f"a stop or a bias is for the token {token!r}, but token ids are integers from 0 to "
                                 f"{vocab_size - 1}: leave it out")
        self.seed, self.stop_ids, self.min_tokens = int(seed) % 2**64, sorted(stop_ids), min_tokens if stop_ids else 0
        self.bias_tokens, self.biases = np.array([*biases], np.int64), np.array([*biases.values()], np.float64)
        if any(map(math.isnan, self.biases)):
            raise ValueError("a bias must be a number, not nan: leave it out")
        self.vocab_size, self.penalised, self.prompt = vocab_size, self.values[4:] != (0.0, 0.0, 1.0), prompt
        self.counts, self.in_prompt, self.allowed = None, None, None

    def with_seed(self, seed):
        """The same settings for another sequence of this prompt, which has drawn nothing. Biases are shared."""
        new = copy.copy(self)
        new.seed = seed % 2**64
        return new

    def count(self, drawn):
        """Make `counts`, which penalties read, those of `drawn`, a list of all tokens that the sequence has drawn."""
        self.counts = np.bincount(np.array(drawn, np.int64), minlength=self.vocab_size)
        if self.in_prompt is None:
            self.in_prompt = np.zeros(self.vocab_size, np.uint8)
            self.in_prompt[list(self.prompt)] = 1

    @property
    def changes_logits(self):
        """May logits be changed before a draw?"""
        return self.penalised or len(self.biases) > 0 or self.min_tokens > 0 or self.allowed is not None

    @property
    def n_largest(self):
        """How many of the largest logits a draw depends on."""
        temperature, top_k = self.values[:2]
        if self.changes_logits or temperature > 0 and top_k == 0:
            return self.vocab_size
        return int(top_k) if temperature > 0 else 1

    def forbidden(self):
        """Which tokens `allowed` leaves out, bool (vocab_size,)."""
        return np.unpackbits(self.allowed.view(np.uint8), count=self.vocab_size, bitorder='little') == 0


def check_values(temperature, top_k, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty):
    """ValueError unless numbers of SETTING_NAMES make sense; a top_k of None, 0 or -1 keeps all."""
    check_sampling(temperature, None if top_k in (None, 0, -1) else top_k, top_p)
    if not 0 <= min_p <= 1 or not 0 < repetition_penalty < math.inf:
        raise ValueError(f"min_p must be from 0 to 1 and repetition_penalty positive, not {min_p} and "
                         f"{repetition_penalty}")
    if not math.isfinite(presence_penalty) or not math.isfinite(frequency_penalty):
        raise ValueError(f"penalties must be numbers, not {presence_penalty} and {frequency_penalty}")


def draw(logits, settings, numbers):
    """
    The next token of each row of logits (B, vocab_size), int64 (B,). settings: the `DrawSettings` of each row. numbers:
    how many tokens the sequence of each row has drawn before. Settings with penalties must have counted these tokens,
    see `DrawSettings.count`.
    """
    if logits.device.type == 'mps':  # it has no float64
        return draw(logits.cpu(), settings, numbers).to(logits.device)
    logits = logits.float()
    if any([s.changes_logits for s in settings]):
        logits = torch.stack([changed(row, *of) for row, *of in zip(logits, settings, numbers)])
    shapes = [s.values[:4] for s in settings]
    if shapes.count(shapes[0]) == len(shapes):
        return draw_alike(logits, *shapes[0], [s.seed for s in settings], numbers)
    return torch.cat([draw_alike(row[None], *shape, [s.seed], [number])
                      for row, shape, s, number in zip(logits, shapes, settings, numbers)])


def changed(row, settings, number):
    """Logits (vocab_size,) after what is allowed, biases, min_tokens and penalties, in this order, which is vLLM's."""
    s, row = settings, row.clone()
    if s.allowed is not None:
        row[torch.from_numpy(s.forbidden()).to(row.device)] = -math.inf
    if len(s.biases):
        at = torch.from_numpy(s.bias_tokens).to(row.device)
        row[at] += torch.from_numpy(s.biases).to(row)
    if number < s.min_tokens:
        row[s.stop_ids] = -math.inf
    if s.penalised:
        presence, frequency, repetition = s.values[4:]
        counts, in_prompt = torch.from_numpy(s.counts).to(row.device), torch.from_numpy(s.in_prompt).to(row.device)
        seen = (counts > 0) | (in_prompt > 0)
        row = torch.where(seen, torch.where(row > 0, row / repetition, row * repetition), row)
        row = torch.where(counts > 0, row - (frequency * counts + presence).to(row), row)
    return row


def draw_alike(logits, temperature, top_k, top_p, min_p, seeds, numbers):
    """`draw` for rows with the same settings, whose logits are changed already."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    every_logit, tokens, largest = logits, np.arange(logits.size(-1))[None], logits.amax(dim=-1, keepdim=True)
    if 0 < top_k < logits.size(-1):
        logits, tokens = kept_by_top_k(logits, int(top_k))
        tokens = tokens.cpu().numpy()
    exponents = (logits - largest) * max(1.0 / temperature, 1e-30)
    weights = exponents.exp().masked_fill_(exponents < LEAST_WEIGHT, 0.0)
    if min_p > 0:
        weights.masked_fill_(weights < min_p, 0.0)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        masses = weights.gather(-1, order).double()
        before = masses.cumsum(dim=-1) - masses
        outside = before >= top_p * masses.sum(dim=-1, keepdim=True)
        outside[:, 0] = False
        weights.masked_fill_(torch.zeros_like(outside).scatter_(-1, order, outside), 0.0)
    # in NumPy, whose calls take a third of the time of torch's
    best = (weights.cpu().numpy() / exponential_noise(seeds, numbers, tokens)).argmax(axis=-1)
    drawn = torch.from_numpy(tokens[np.arange(len(tokens)), best]).to(logits.device)
    if not math.isfinite(largest.sum()):  # a penalty can make a logit infinite
        drawn = torch.where(largest[:, 0].isfinite(), drawn, every_logit.argmax(dim=-1))
    return drawn


def kept_by_top_k(logits, k):
    """The logits (B, n) that are at least the k-th largest of their row, and their token ids, in ascending order."""
    top, n = logits.topk(min(k + 1, logits.size(-1))), k
    kth = top.values[:, k - 1:k]
    if (top.values[:, k:] == kth).any():  # equal ones at the border: all of them are kept, unless they are -inf
        n = max(k, int(((logits >= kth) & (logits > -math.inf)).sum(dim=-1).max()))
        top = logits.topk(n)
    tokens = top.indices[:, :n].sort(dim=-1).values
    found = logits.gather(-1, tokens)
    return found.masked_fill(found < kth, -math.inf), tokens


def exponential_noise(seeds, numbers, tokens):
    """
    The noise of tokens, integers (B, n) or (1, n), as float64 (B, n). Row b is for the sequence with seeds[b] and its
    draw numbers[b]. Noise is minus the logarithm of a number between 0 and 1 of 52 bits, which splitmix64 makes of the
    seed, the number and the token.
    """
    # Python's integers are faster than NumPy's arrays for a few rows
    keys = np.array([mixed(mixed(seed + GOLDEN) + (number + 1) * GOLDEN) for seed, number in zip(seeds, numbers)],
                    np.uint64)
    x = keys[:, None] + (np.asarray(tokens).astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MULTIPLIERS[0])
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MULTIPLIERS[1])
    x ^= x >> np.uint64(31)
    return -np.log(((x >> np.uint64(12)) + 0.5) * 2.0**-52)


def mixed(x):
    """
    The finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), of an
    integer whose lowest 64 bits count.
    """
    x &= 2**64 - 1
    x = (x ^ x >> 30) * MULTIPLIERS[0] & 2**64 - 1
    x = (x ^ x >> 27) * MULTIPLIERS[1] & 2**64 - 1
    return x ^ x >> 31


def log_probabilities(logits, tokens, k):
    """
    For each row of logits (n, vocab_size) and its token: (the token's log probability, the k likeliest tokens, their
    log probabilities), lists (n,), (n, k) and (n, k). Equally likely tokens are in ascending order.
    """
    logits = (logits.cpu() if logits.device.type == 'mps' else logits).float()  # mps has no float64
    largest = logits.amax(dim=-1, keepdim=True)
    totals = largest.double() + (logits - largest).exp().sum(dim=-1, keepdim=True).double().log()
    own = logits.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])
    found, top = kept_by_top_k(logits, min(max(k, 1), logits.size(-1)))
    found, order = found.sort(dim=-1, descending=True, stable=True)
    top, values = top.gather(-1, order[:, :k]), found[:, :k] - totals
    return (own - totals).squeeze(-1).tolist(), top.tolist(), values.tolist()
