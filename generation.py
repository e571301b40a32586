"""
Generation beyond `GPT.generate`: prompts of any lengths in one batch, stop tokens, several samples of a prompt, what
becomes of a full context, and caches other than the model's tuples.

    for tokens in stream(model, [[1, 2, 3], [4]], 100, use_cache=True):     # (2, 1): a token for each prompt
        ...

A `Sequence` is one text that is being continued, a cache (`kvcache.base.BaseCache`) keeps keys and values of many.
`advance` feeds to the cache what it lacks of each sequence and returns the logits for their next tokens. `stream` is a
loop of that and of sampling.
"""
import math
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import NoneType

import torch

from decode.process import uninterrupted
from inputs import as_int64
from kvcache.base import NotNumbers, are_numbers
from kvcache.contiguous import cache_for
from model import check_sampling, sample_token


@dataclass(eq=False)
class Sequence:
    """
    One text that is being continued. Its context is what the model is given: all of the text, or, of a text that is
    longer than max_positions, its first n_keep and its last tokens.

    tokens: all tokens, the only record of them. keep, n_keep: a context of max_positions tokens that gets another one
    becomes the first n_keep tokens and the last `keep`. shifts: does the cache then keep their keys and values, at new
    positions? length: tokens in the context. cached: how many of these the cache holds. n_removed: tokens that the
    cache must still remove behind the first n_keep. handle: the cache's name for the sequence. generator: its own
    torch.Generator, which makes its draws independent of the rest of the batch; None if all of a batch draw together.
    """
    tokens: list[int]
    max_positions: int | float
    keep: int
    n_keep: int = 0
    shifts: bool = False
    length: int = field(default=0, init=False)
    cached: int = field(default=0, init=False)
    n_removed: int = field(default=0, init=False)
    handle: object = field(default=None, init=False)
    generator: torch.Generator | None = field(default=None, init=False)

    def __post_init__(self):
        self.length = min(len(self.tokens), self.max_positions)

    def uncached(self):
        """The tokens of the context that the cache lacks, a list."""
        first = self.tokens[self.cached:self.n_keep]
        rest = self.length - max(self.cached, self.n_keep)
        return first + self.tokens[len(self.tokens) - rest:]

    def append(self, token):
        self.tokens.append(token)
        self.lengthen()

    def lengthen(self):
        """Count one more token in the context, and cut the context if it was full."""
        if self.length < self.max_positions:
            self.length += 1
            return
        self.length = self.n_keep + self.keep
        if self.shifts:
            self.n_removed, self.cached = self.cached + 1 - self.length, self.length - 1
        else:  # the tokens that are left have other positions, and with them other keys and values
            self.cached = 0

    def fork(self, handle):
        """A second sequence with the same tokens, which the cache knows as `handle`."""
        new = replace(self, tokens=self.tokens[:])
        new.length, new.cached, new.n_removed, new.handle = self.length, self.cached, self.n_removed, handle
        return new


def make_sequences(model, prompts, when_full=None, keep=None, n_keep=0):
    """
    A `Sequence` for each prompt: (B, T) or token lists; when_full, keep and n_keep are those of `stream`. ValueError on
    an empty prompt, on ids that are not in the vocabulary, and on settings that make no sense.
    """
    c, prompts = model.config, checked_prompts(model, prompts)
    endless = c.max_positions == math.inf
    when_full = when_full or ('roll' if endless else 'crop')
    if endless or when_full == 'crop':
        if keep is not None or n_keep or when_full == 'shift' or (when_full == 'crop') is endless:
            raise ValueError(f"a model with position={c.position}, window={c.window} and n_sink={c.n_sink} takes "
                             f"when_full={'roll' if endless else 'crop, without keep and n_keep, or shift'}; not "
                             f"{when_full!r} with keep={keep}, n_keep={n_keep}")
        return [Sequence(tokens, c.max_positions, c.block_size) for tokens in prompts]
    sequences, shifts = [], c.position != 'learned'
    for tokens in prompts:
        kept, last = min(n_keep, len(tokens)), keep
        if last is None:
            # of keys that stay in the cache, half are removed; the newest token comes on top
            last = c.block_size - kept - (c.block_size - kept) // 2 + 1 if shifts else c.block_size // 2
            last = max(1, min(last, c.block_size - kept))
        if last < 1 or kept < 0 or kept + last > c.block_size:
            raise ValueError(f"n_keep={kept} and keep={last} tokens of a full context, of these at least 1, "
                             f"must fit in {c.block_size}")
        sequences.append(Sequence(tokens, c.block_size, last, kept, shifts))
    return sequences


def checked_prompts(model, prompts):
    """The token ids of each prompt, a list of lists. ValueError if one is empty or not of the model's vocabulary."""
    vocab_size = model.config.vocab_size
    if isinstance(prompts, torch.Tensor):
        if prompts.dim() != 2 or prompts.numel() == 0:
            raise ValueError(f"the prompt must be (B, T) with at least one token, not {tuple(prompts.shape)}: "
                             "start from a newline, for example")
        prompts = list(as_int64('the prompt', prompts))
    try:
        prompts = [torch.as_tensor(prompt, device='cpu') for prompt in prompts]
    except (TypeError, ValueError, RuntimeError) as e:  # strings, lists in lists, more than 64 bits
        raise ValueError(f"prompts must be lists of integers within the vocabulary of {vocab_size}: {e}") from None
    if not prompts or not all(prompt.dim() == 1 and len(prompt) for prompt in prompts):
        raise ValueError("prompts must be lists of at least one token each: start from a newline, for example")
    prompts = [as_int64('a prompt', prompt).tolist() for prompt in prompts]
    if any(min(tokens) < 0 or max(tokens) >= vocab_size for tokens in prompts):
        raise ValueError(f"the prompt must be integers within the vocabulary of {vocab_size}")
    return prompts


def advance(sequences, cache, device, newest=None):
    """
    Feed to the cache what it lacks of each sequence, at least one token. Returns logits (B, vocab_size).

    newest: these tokens as a tensor (B, 1) on device, if the caller has them and each sequence lacks one.
    """
    for s in sequences:
        if s.n_removed:
            cache.shift(s.handle, s.n_keep, s.n_removed)
            s.n_removed = 0
    tokens = newest
    if newest is None:
        tokens = [torch.tensor(s.uncached(), dtype=torch.int64, device=device) for s in sequences]
        if len({len(new) for new in tokens}) == 1:
            tokens = torch.stack(tokens)
    logits = cache.step([s.handle for s in sequences], [s.cached for s in sequences], tokens)
    for s in sequences:
        s.cached = s.length
    return logits


def stream(model, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, use_cache=False, stop_token=None,
           generator=None, decoder=None, num_samples=1, when_full=None, keep=None, n_keep=0, cache=None):
    """
    Continue the prompts idx, (B, T) or a list of token lists. Yields each step's tokens, (B * num_samples, 1).

    temperature, top_k, top_p, generator: as in `model.sample_token`. A list of generators, one for each of the
        B * num_samples rows, makes a row's draws independent of the rest of the batch.
    use_cache: read the prompt once, then one token a step. The tokens are the same either way.
    stop_token: a row that draws it repeats it from then on; the stream ends when every row has drawn it.
    decoder: takes the model's place, with the cache; a callable (idx, kv_cache) -> (logits, kv_cache), where
        kv_cache=None asks for a prefill. It reads and writes the model's tuples.
    cache: one of kvcache/, which takes the place of the tuples.
    num_samples: continuations of each prompt, next to each other in the batch; the prompt is read once.
    when_full: the context once it holds block_size tokens and gets another.
        'crop': the last block_size tokens, as in nanoGPT. Each token then costs a full pass, with the cache or without.
        'shift': the first n_keep tokens of the prompt and the last `keep`, by default half of block_size, moved to
        positions 0, 1, ... That makes room for more tokens at one step each. The tokens are others than with 'crop'.
        A prompt that is shorter than n_keep is kept whole. Learned positions are part of the keys, so what is left is
        computed again. Otherwise the cache keeps it and moves its keys, which takes the cache.
        'roll': no context is ever full. It is the default for models with a window, and exact. A model without a window
        is then given one of `keep` tokens, by default block_size - n_keep, and the first n_keep tokens as sinks: see
        `GPT.with_window`. The tokens are others than with 'crop'. Learned positions cannot roll.

    Runs without gradients and in eval mode, and restores each module's own mode between tokens. (Where several threads
    share a model, call its eval() before.) Unless it rolls, a prompt longer than block_size is cropped to its end (with
    'shift', after its first n_keep tokens). Raises ValueError, before anything is computed, on prompts and settings
    that make no sense.
    """
    # other code may draw from a shared generator between two tokens, so steps are not made ahead with one
    steps = checked_run(model, idx, max_new_tokens, temperature, top_k, top_p, use_cache, stop_token, generator,
                        decoder, num_samples, when_full, keep, n_keep, cache,
                        ahead=temperature == 0 or isinstance(generator, (list, tuple)))
    return (tokens.clone() for tokens in steps)  # the next step depends on these tokens, so the caller gets a copy


def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, use_cache=False, stop_token=None,
             generator=None, decoder=None, num_samples=1, **more):
    """
    `stream`, with the same arguments, collected behind the prompts: idx (B, T) -> (B * num_samples, T + new tokens).
    Given a list of token lists, returns a list of token lists, each up to its stop token.
    """
    steps = checked_run(model, idx, max_new_tokens, temperature, top_k, top_p, use_cache, stop_token, generator,
                        decoder, num_samples, **more)
    if decoder is None:  # a cache may have one
        decoder = getattr(more.get('cache'), 'executor', None)
    with evaluating(model), getattr(decoder, 'torch_on_one_thread', nullcontext)():
        tokens = list(steps)
    device = model.lm_head.weight.device
    if isinstance(idx, torch.Tensor):
        return torch.cat([idx.long().to(device).repeat_interleave(num_samples, dim=0), *tokens], dim=1)
    rows = [list(map(int, prompt)) for prompt in idx for _ in range(num_samples)]
    new = torch.cat(tokens, dim=1).tolist() if tokens else [[] for _ in rows]
    ends = [n.index(stop_token) + 1 if stop_token in n else len(n) for n in new]
    return [row + n[:end] for row, n, end in zip(rows, new, ends)]


def checked_run(model, idx, max_new_tokens, temperature, top_k, top_p, use_cache, stop_token, generator, decoder,
                num_samples, when_full=None, keep=None, n_keep=0, cache=None, ahead=True):
    """
    Check the arguments of `stream` and begin: yields its tokens, which must not be written to. ahead: may several steps
    be made before their tokens are yielded, where the cache's executor draws tokens?
    """
    if max_new_tokens < 0 or num_samples < 1:
        raise ValueError(f"max_new_tokens must be at least 0 and num_samples at least 1, not {max_new_tokens} and "
                         f"{num_samples}")
    if decoder is not None and cache is not None:
        raise ValueError("decoder and cache were both given, but a decoder's cache are the model's tuples: pass one")
    if (decoder is not None or cache is not None) and not use_cache:
        raise ValueError(f"a {'decoder' if cache is None else 'cache'} was given but use_cache is False: pass "
                         "use_cache=True as well")
    if when_full not in (None, 'crop', 'shift', 'roll') or type(n_keep) is not int or type(keep) not in (int, NoneType):
        raise ValueError("when_full must be 'crop', 'shift' or 'roll', and keep and n_keep integers; not "
                         f"{when_full!r}, {keep!r} and {n_keep!r}")
    if when_full == 'roll' and model.config.max_positions != math.inf:
        model, keep, n_keep = rolling(model, keep, n_keep, decoder or cache), None, 0
    sequences = make_sequences(model, idx, when_full, keep, n_keep)
    if sequences[0].shifts and not use_cache:
        raise ValueError("when_full='shift' keeps keys and values of this model, so it needs the cache: pass "
                         "use_cache=True")
    check_sampling(temperature, top_k, top_p)
    n_rows = len(sequences) * num_samples
    own, generator = (generator, None) if isinstance(generator, (list, tuple)) else ([None] * n_rows, generator)
    if len(own) != n_rows:
        raise ValueError(f"{len(own)} generators for {n_rows} rows: pass one for each, or one for all")
    if cache is None:
        cache = cache_for(model, n_rows, decoder) if use_cache else NoCache(model)
    noise = partial(draw_noise, generator=generator, B=n_rows)
    sample = partial(sample_tokens, noise=noise, temperature=temperature, top_k=top_k, top_p=top_p)
    steps_ahead = getattr(getattr(cache, 'executor', None), 'steps_ahead', None) if ahead else None
    ahead = steps_ahead and steps_ahead(cache, temperature, top_k, top_p, stop_token, noise, generator)
    return run(model, cache, sequences, own, max_new_tokens, stop_token, sample, ahead)


def rolling(model, keep=None, n_keep=0, decoder_or_cache=None):
    """A model without a window as when_full='roll' runs it. ValueError if it cannot roll."""
    c, window = model.config, model.config.block_size - n_keep if keep is None else keep
    if c.position == 'learned':
        raise ValueError("when_full='roll' keeps keys and values while their positions grow, and learned positions end "
                         f"at block_size {c.block_size}: use 'crop' or 'shift', or train with position=rope or alibi")
    if window < 1 or n_keep < 0 or n_keep + window > c.block_size:
        raise ValueError(f"n_keep={n_keep} and keep={window} tokens, of these at least 1, must fit in {c.block_size}")
    if decoder_or_cache is not None:
        raise ValueError(f"the decoder or cache is for a model without a window: make it for a model that rolls, "
                         f"model.with_window({window}, {n_keep}), pass that model, and leave keep and n_keep out")
    return model.with_window(window, n_keep)


def run(model, cache, sequences, generators, max_new_tokens, stop_token, sample, ahead):
    """
    The tokens (B, 1) of each step of `stream`. generators: one for each row, or None. sample: `sample_tokens` with the
    settings of the run. ahead: a `decode.ahead.StepsAhead`, or None for one step at a time.
    """
    device, B = model.lm_head.weight.device, len(generators)
    # reading a token makes a GPU wait, so it is done where a token has to be known: to stop, and to cut a context
    reading = device.type == 'cpu' or stop_token is not None
    live, stopped, unread, newest = list(range(B)), [False] * B, [], None  # live: the batch row of each sequence
    no_gradients, in_eval_mode, handles = torch.inference_mode(), nullcontext(), []  # handles: those still to be freed
    n_done = 0
    try:
        while n_done < max_new_tokens:
            with uninterrupted(), no_gradients, evaluating(model) if model.training else in_eval_mode:
                if n_done == 0:
                    for s in sequences:
                        s.handle = cache.new()
                        handles.append(s.handle)
                if not all([s.cached for s in sequences]):  # a context was cut: it is fed anew
                    newest = None
                if unread and newest is None:
                    for s, tokens in zip(sequences, torch.cat(unread, dim=1).tolist()):
                        s.tokens += tokens
                    unread.clear()
                n_ahead = steps_until_full(sequences, max_new_tokens - n_done) if ahead and newest is not None else 0
                if n_ahead > 1:
                    steps = ahead.draw(sequences, live, newest, [stopped[row] for row in live], n_ahead)
                else:
                    logits = advance(sequences, cache, device, newest)
                    if (n_done == 0 or device.type == 'cpu') and not are_numbers(logits):
                        raise NotNumbers
                    if n_done == 0:  # the prompts are read; from here on each sample is a sequence
                        n_each = B // len(sequences)
                        sequences = [each for s in sequences for each in with_forks(s, n_each - 1, cache, handles)]
                        for s, generator in zip(sequences, generators):
                            s.generator = generator
                        logits = logits.repeat_interleave(n_each, dim=0) if n_each > 1 else logits
                    steps = [sample(logits, sequences, live)]
                yielded = []
                for newest in steps:
                    if not reading:
                        unread.append(newest)
                        for s in sequences:
                            s.lengthen()
                    else:
                        newest = read(newest, sequences, live, stopped, stop_token)
                    tokens = newest
                    if len(live) < B:
                        tokens = newest.new_full((B, 1), stop_token)
                        tokens[live] = newest
                    yielded.append(tokens)
                n_done += len(steps)
                n_left = B - sum(stopped)
                if 0 < n_left <= len(live) // 2:  # at most log2(B) times, since a cache may copy all that stay
                    for s, row in zip(sequences, live):
                        if stopped[row]:
                            handles.remove(s.handle)
                            cache.free(s.handle)
                    sequences = [s for s, row in zip(sequences, live) if not stopped[row]]
                    live, newest = [row for row in live if not stopped[row]], None
            for n_yielded, tokens in enumerate(yielded, 1):
                try:
                    yield tokens
                except GeneratorExit:  # the caller wants no more than these
                    if ahead:
                        ahead.set_back(n_yielded)
                    raise
            if n_left == 0:
                return
    finally:
        try:
            free_all(cache, handles)
        except KeyboardInterrupt:  # it may have come before anything was freed
            free_all(cache, handles)
            raise


def read(newest, sequences, live, stopped, stop_token):
    """Add tokens (n, 1) to their sequences. Rows that have stopped get the stop token. Returns all, (n, 1)."""
    drawn = [token for token, in newest.tolist()]
    if stop_token is not None:
        drawn = [stop_token if stopped[row] else token for row, token in zip(live, drawn)]
        newest = torch.tensor(drawn, device=newest.device)[:, None]
        for row, token in zip(live, drawn):
            stopped[row] = token == stop_token
    for s, token in zip(sequences, drawn):
        s.cached = s.length
        s.append(token)
    return newest


def steps_until_full(sequences, most):
    """How many steps can follow each other, at most, before a context is cut or shifted."""
    if any([s.n_removed or s.cached != s.length - 1 for s in sequences]):
        return 1
    return min(most, min([s.max_positions - s.cached for s in sequences]))


def free_all(cache, handles):
    with uninterrupted():
        while handles:
            cache.free(handles.pop(0))


def with_forks(sequence, n, cache, handles):
    """A sequence and n forks of it, whose handles are added to the list `handles`."""
    forks = []
    for _ in range(n):
        forks.append(sequence.fork(cache.fork(sequence.handle)))
        handles.append(forks[-1].handle)
    return [sequence, *forks]


@contextmanager
def evaluating(model):
    """Eval mode inside; afterwards every module is back in its own mode."""
    training = [m for m in model.modules() if m.training]
    try:
        model.eval()
        yield
    finally:
        for m in training:
            m.training = True


class NoCache:
    """Keeps the tokens of each sequence and computes them all in each step: what generation without a cache is."""
    name = 'no cache'

    def __init__(self, model):
        self.model, self.tokens = model, {}  # {handle: (T,)}

    def new(self):
        handle = len(self.tokens)
        self.tokens[handle] = None
        return handle

    def fork(self, handle):
        new = self.new()
        self.tokens[new] = self.tokens[handle]
        return new

    def free(self, handle):
        self.tokens[handle] = None

    def step(self, handles, starts, tokens):
        """See `kvcache.base.BaseCache.step`. Sequences of different lengths are computed one by one."""
        for handle, start, new in zip(handles, starts, tokens):
            self.tokens[handle] = torch.cat([self.tokens[handle][:start], new]) if start else new
        texts = [self.tokens[handle] for handle in handles]
        together = [texts] if len({len(text) for text in texts}) == 1 else [[text] for text in texts]
        return torch.cat([self.model.step(torch.stack(part), None, use_cache=False)[0] for part in together])[:, 0]


def sample_tokens(logits, sequences, live, noise, temperature, top_k, top_p):
    """The next token of each sequence, (n, 1), from logits (n, vocab_size). noise: `draw_noise`."""
    drawn = noise(torch.empty_like(logits), sequences, live) if temperature else None
    return sample_token(logits, temperature, top_k, top_p, noise=drawn)


def draw_noise(noise, sequences, live, generator, B):
    """
    Fill and return noise (n, vocab_size) for the next tokens of n sequences: drawn by their own generators, or by one
    that draws for all rows of a batch of B, whether they are live or not.
    """
    if sequences[0].generator is not None:
        for s, noise_of_row in zip(sequences, noise):
            noise_of_row.exponential_(generator=s.generator)
        return noise
    if len(live) < B:
        return noise.copy_(noise.new_empty(B, noise.size(1)).exponential_(generator=generator)[live])
    return noise.exponential_(generator=generator)
