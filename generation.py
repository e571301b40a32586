"""
Generation beyond `GPT.generate`: prompts of any lengths in one batch, stop tokens, several samples of a prompt, what
becomes of a full context, and caches other than the model's tuples.

    for tokens in stream(model, [[1, 2, 3], [4]], 100, use_cache=True):     # (2, 1): a token for each prompt
        ...

A `Sequence` is one text that is being continued, a `Cache` keeps keys and values of many. `advance` feeds to the cache
what it lacks of each sequence and returns the logits for their next tokens. `stream` is a loop of that and of sampling.
"""
import math
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from kvcache.exclusive import evaluating
from kvcache.tuples import NoCache, TupleCache
from model import as_int64, check_sampling, sample_token


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn, see `model.sample_token`. Raises ValueError on settings that make no sense."""
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        check_sampling(self.temperature, self.top_k, self.top_p)


@dataclass(eq=False)
class Sequence:
    """
    One text that is being continued. Its context, what the model is given, is all of it, or of a text that has
    outgrown block_size its first n_keep tokens and its last ones.

    tokens: all tokens, the only record of them. keep, n_keep: a context of block_size tokens that gets another one
    becomes the first n_keep tokens and the last `keep`. length: tokens in the context. cached: how many of these the
    cache holds. handle: the cache's name for the sequence.
    """
    tokens: list[int]
    block_size: int
    keep: int
    n_keep: int = 0
    length: int = field(default=0, init=False)
    cached: int = field(default=0, init=False)
    handle: object = field(default=None, init=False)

    def __post_init__(self):
        self.length = min(len(self.tokens), self.block_size)

    def uncached(self):
        """The tokens of the context that the cache lacks, a list."""
        first = self.tokens[self.cached:self.n_keep]
        rest = self.length - max(self.cached, self.n_keep)
        return first + self.tokens[len(self.tokens) - rest:]

    def append(self, token):
        self.tokens.append(token)
        self.lengthen()

    def lengthen(self):
        """Count one more token in the context. If it was full, cut it: the cache then holds nothing of it."""
        if self.length < self.block_size:
            self.length += 1
        else:  # the tokens that are left have other positions, and with them other keys and values
            self.length, self.cached = self.n_keep + self.keep, 0

    def fork(self, handle):
        """A second sequence with the same tokens, which the cache knows as `handle`."""
        new = Sequence(self.tokens[:], self.block_size, self.keep, self.n_keep)
        new.length, new.cached, new.handle = self.length, self.cached, handle
        return new


class Work(NamedTuple):
    """
    New tokens of B sequences. starts: the position of the first new token of each. tokens: int64 (B, T) if all bring T
    of them, or a list of (T_i,).
    """
    handles: list
    starts: list[int]
    tokens: torch.Tensor | list


class Cache(Protocol):
    """Keys and values of many sequences, for one model."""

    def new(self):
        """The handle of a new sequence without tokens. ValueError where there is no room for another."""

    def fork(self, handle):
        """The handle of a new sequence that has all tokens of this one."""

    def truncate(self, handle, n):
        """Keep the first n tokens of a sequence. ValueError if it has fewer."""

    def free(self, handle):
        """Forget a sequence."""

    def step(self, work):
        """
        Feed the tokens of a `Work`. Returns logits (B, vocab_size), for the token after the last one of each sequence.

        A sequence that is longer than its start is truncated to it first. ValueError if it is shorter, if there is no
        room, and on tokens that do not fit the model. After a step that failed each sequence has its first `start`
        tokens.
        """


def make_sequences(model, prompts, when_full='crop', keep=None, n_keep=0):
    """
    A `Sequence` for each prompt: (B, T) or token lists; when_full, keep and n_keep are those of `stream`. ValueError on
    an empty prompt, on ids that are not in the vocabulary, and on settings that make no sense.
    """
    block_size, vocab_size = model.config.block_size, model.config.vocab_size
    if not isinstance(n_keep, int) or not isinstance(keep, int | None):
        raise ValueError(f"keep and n_keep must be integers, not {keep!r} and {n_keep!r}")
    if when_full not in ('crop', 'shift') or when_full == 'crop' and (keep is not None or n_keep):
        raise ValueError(f"when_full is 'crop', or 'shift' with keep and n_keep; "
                         f"not {when_full!r} with keep={keep}, n_keep={n_keep}")
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
    sequences = []
    for prompt in prompts:
        tokens = as_int64('a prompt', prompt).tolist()
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise ValueError(f"the prompt must be integers within the vocabulary of {vocab_size}")
        kept, last = min(n_keep, len(tokens)), block_size if when_full == 'crop' else keep
        if last is None:
            last = max(1, min(block_size // 2, block_size - kept))
        if last < 1 or kept < 0 or kept + last > block_size:
            raise ValueError(f"n_keep={kept} and keep={last} tokens of a full context, of these at least 1, "
                             f"must fit in {block_size}")
        sequences.append(Sequence(tokens, block_size, last, kept))
    return sequences


def advance(sequences, cache, device, newest=None):
    """
    Feed to the cache what it lacks of each sequence, at least one token. Returns logits (B, vocab_size).

    newest: these tokens as a tensor (B, 1) on device, if the caller has them and each sequence lacks one.
    """
    tokens = newest
    if newest is None:
        tokens = [torch.tensor(s.uncached(), dtype=torch.int64, device=device) for s in sequences]
        if len({len(new) for new in tokens}) == 1:
            tokens = torch.stack(tokens)
    logits = cache.step(Work([s.handle for s in sequences], [s.cached for s in sequences], tokens))
    for s in sequences:
        s.cached = s.length
    return logits


def stream(model, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, use_cache=False, stop_token=None,
           generator=None, decoder=None, num_samples=1, when_full='crop', keep=None, n_keep=0, cache=None):
    """
    Continue the prompts idx, (B, T) or a list of token lists. Yields each step's tokens, (B * num_samples, 1).

    temperature, top_k, top_p, generator: as in `model.sample_token`. A list of generators, one for each of the
        B * num_samples rows, makes a row's draws independent of the rest of the batch.
    use_cache: read the prompt once, then one token a step. The tokens are the same either way.
    stop_token: a row that draws it repeats it from then on; the stream ends when every row has drawn it.
    decoder: takes the model's place, with the cache; a callable (idx, kv_cache) -> (logits, kv_cache), where
        kv_cache=None asks for a prefill. It reads and writes the model's tuples.
    cache: a `Cache` that takes the place of the tuples, such as those of kvcache/.
    num_samples: continuations of each prompt, next to each other in the batch; the prompt is read once.
    when_full: the context once it holds block_size tokens and gets another.
        'crop': the last block_size tokens, as in nanoGPT. Each token then costs a full pass, with the cache or without.
        'shift': the first n_keep tokens of the prompt and the last `keep`, by default half of block_size, moved to
        positions 0, 1, ... That makes room for more tokens at one step each. The tokens are others than with 'crop'.
        A prompt that is shorter than n_keep is kept whole.

    Runs without gradients and in eval mode, and restores each module's own mode between tokens. Prompts longer than
    block_size are cropped to their end (with 'shift', after their first n_keep tokens). Raises ValueError, before
    anything is computed, on prompts and settings that make no sense.
    """
    steps = checked_run(model, idx, max_new_tokens, temperature, top_k, top_p, use_cache, stop_token, generator,
                        decoder, num_samples, when_full, keep, n_keep, cache)
    return (tokens.clone() for tokens in steps)  # the next step depends on these tokens, so the caller gets a copy


def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, use_cache=False, stop_token=None,
             generator=None, decoder=None, num_samples=1, **more):
    """
    `stream`, with the same arguments, collected behind the prompts: idx (B, T) -> (B * num_samples, T + new tokens).
    Given a list of token lists, returns a list of token lists, each up to its stop token.
    """
    steps = checked_run(model, idx, max_new_tokens, temperature, top_k, top_p, use_cache, stop_token, generator,
                        decoder, num_samples, **more)
    # no other code runs between these steps, so nothing changes the weights and a decoder need not look each time
    with evaluating(model), getattr(decoder, 'exclusive_use', nullcontext)():
        tokens = list(steps)
    device = model.lm_head.weight.device
    if isinstance(idx, torch.Tensor):
        return torch.cat([idx.long().to(device).repeat_interleave(num_samples, dim=0), *tokens], dim=1)
    rows = [list(map(int, prompt)) for prompt in idx for _ in range(num_samples)]
    new = torch.cat(tokens, dim=1).tolist() if tokens else [[] for _ in rows]
    ends = [n.index(stop_token) + 1 if stop_token in n else len(n) for n in new]
    return [row + n[:end] for row, n, end in zip(rows, new, ends)]


def checked_run(model, idx, max_new_tokens, temperature, top_k, top_p, use_cache, stop_token, generator, decoder,
                num_samples, when_full='crop', keep=None, n_keep=0, cache=None):
    """Check the arguments of `stream` and begin: yields its tokens, which must not be written to."""
    if max_new_tokens < 0 or num_samples < 1:
        raise ValueError(f"max_new_tokens must be at least 0 and num_samples at least 1, not {max_new_tokens} and "
                         f"{num_samples}")
    if decoder is not None and cache is not None:
        raise ValueError("decoder and cache were both given, but a decoder's cache are the model's tuples: pass one")
    if (decoder is not None or cache is not None) and not use_cache:
        raise ValueError(f"a {'decoder' if cache is None else 'cache'} was given but use_cache is False: pass "
                         "use_cache=True as well")
    sequences, sampling = make_sequences(model, idx, when_full, keep, n_keep), Sampling(temperature, top_k, top_p)
    n_rows = len(sequences) * num_samples
    if isinstance(generator, (list, tuple)) and len(generator) != n_rows:
        raise ValueError(f"{len(generator)} generators for {n_rows} rows: pass one for each, or one for all")
    if cache is None:
        cache = TupleCache(model, decoder) if use_cache else NoCache(model)
    return run(model, cache, sequences, num_samples, max_new_tokens, sampling, generator, stop_token)


def run(model, cache, sequences, num_samples, max_new_tokens, sampling, generator, stop_token):
    """The steps of `stream`: yields tokens (B, 1)."""
    device, B = model.lm_head.weight.device, len(sequences) * num_samples
    # reading a token makes a GPU wait, so it is done where a token has to be known: to stop, and to cut a context
    reading = device.type == 'cpu' or stop_token is not None
    live, stopped, unread, newest = list(range(B)), [False] * B, [], None  # live: the batch row of each sequence
    no_gradients, in_eval_mode, handles = torch.inference_mode(), nullcontext(), []  # handles: those still to be freed
    try:
        for s in sequences:
            handles.append(cache.new())
            s.handle = handles[-1]
        for step in range(max_new_tokens):
            with no_gradients, evaluating(model) if model.training else in_eval_mode:
                if not all([s.cached for s in sequences]):  # a context was cut: it is fed anew
                    newest = None
                if unread and newest is None:
                    for s, tokens in zip(sequences, torch.cat(unread, dim=1).tolist()):
                        s.tokens += tokens
                    unread.clear()
                logits = advance(sequences, cache, device, newest)
                if (step == 0 or device.type == 'cpu') and not math.isfinite(logits.sum()) and (
                        F.softmax(logits, dim=-1).isnan().any()):  # of NaN and +inf, not of -inf
                    raise ValueError("the model's logits are not numbers: its weights are broken")
                if step == 0 and num_samples > 1:  # the prompts are read; from here on each sample is a sequence
                    logits, prompts, sequences = logits.repeat_interleave(num_samples, dim=0), sequences, []
                    for s in prompts:
                        sequences.append(s)
                        for _ in range(num_samples - 1):
                            handles.append(cache.fork(s.handle))
                            sequences.append(s.fork(handles[-1]))
                noise = draw_noise(logits, generator, live, B) if sampling.temperature else None
                newest = sample_token(logits, sampling.temperature, sampling.top_k, sampling.top_p, generator, noise)
                if not reading:
                    unread.append(newest)
                    for s in sequences:
                        s.lengthen()
                else:
                    drawn = [token for token, in newest.tolist()]
                    if stop_token is not None:
                        drawn = [stop_token if stopped[row] else token for row, token in zip(live, drawn)]
                        newest = torch.tensor(drawn, device=device)[:, None]
                        for row, token in zip(live, drawn):
                            stopped[row] = token == stop_token
                    for s, token in zip(sequences, drawn):
                        s.append(token)
                tokens = newest
                if len(live) < B:
                    tokens = newest.new_full((B, 1), stop_token)
                    tokens[live] = newest
            yield tokens
            if stop_token is None:
                continue
            n_left = B - sum(stopped)
            if n_left == 0:
                return
            if n_left <= len(live) // 2:  # at most log2(B) times, since a cache may copy all that stay
                finished = [s.handle for s, row in zip(sequences, live) if stopped[row]]
                free_all(cache, finished[:])
                handles = [handle for handle in handles if handle not in finished]
                sequences = [s for s, row in zip(sequences, live) if not stopped[row]]
                live = [row for row in live if not stopped[row]]
                newest = None
    finally:
        free_all(cache, handles)


def free_all(cache, handles):
    """Free sequences; if an interrupt comes in between, the rest of them before it goes on."""
    try:
        while handles:
            with suppress(ValueError):  # an earlier interrupt came after it was freed
                cache.free(handles[-1])
            handles.pop()
    except BaseException:
        for handle in handles:
            with suppress(ValueError):
                cache.free(handle)
        raise


def draw_noise(logits, generator, live, B):
    """
    Exponential noise for the live rows of a batch of B, logits (n, vocab_size): from each row's own generator, or from
    one that draws for all B rows, whether they are live or not. None if all are: `sample_token` then draws the same.
    """
    if isinstance(generator, (list, tuple)):
        noise = torch.empty_like(logits)
        for row, noise_of_row in zip(live, noise):
            noise_of_row.exponential_(generator=generator[row])
        return noise
    if len(live) == B:
        return None
    return logits.new_empty(B, logits.size(1)).exponential_(generator=generator)[live]
