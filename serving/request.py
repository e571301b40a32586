"""What a client asks for: a `Request`. What it gets: `Output`s, and how often it gets them."""
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

SHORTEST, LONGEST = 0.04, 0.2  # seconds between two chunks of a stream, at least and at most
CHUNKS = 400  # the number of chunks that all streams together write in a second: each chunk takes time from the model


@dataclass(eq=False)
class Request:
    """A prompt and its n samples. Sample i draws with seed + i."""
    id: str
    prompt: list                      # token ids
    max_tokens: int = 16              # of each sample; 0 computes the prompt only
    seed: int = 0
    n: int = 1
    draw: dict = field(default_factory=dict)  # settings of `decode.draw.DrawSettings`, min_tokens, logit_bias, by name
    stop: tuple = ()                  # strings that end a sample
    stop_token_ids: list = ()         # further tokens that end one
    ignore_eos: bool = False          # the engine's end_tokens end nothing
    logprobs: int | None = None       # how many of the likeliest tokens to report beside each one that was drawn, with
                                      # the log probabilities of the model, before anything is done to its logits
    prompt_logprobs: bool = False     # report them for the prompt too, which is then computed from its first token on
    cache_salt: str = ''              # only requests with the same one share what is remembered
    # called in the engine's thread with a list of `Output`s, at most once a call; it must return at once
    deliver: Callable = field(default=lambda outputs: None, repr=False)
    include_stop: bool = False        # the stop string or token that ends a sample is a part of its text
    skip_special: bool = True         # special tokens have no text
    strip: bool = False               # leave out the blank with which a text begins
    constraint: object | None = None  # the form of the texts, a `constraints.Constraint`


class Logprobs(NamedTuple):
    """Of a token. top: the likeliest instead of it, pairs (token id, log probability), from the likeliest on."""
    logprob: float
    top: list


class Output(NamedTuple):
    """The new tokens and the new text of one sample, after one call or several."""
    index: int                            # the number of the sample in its request
    token_ids: list                       # with the stop token that has ended it
    text: str = ''                        # what may be sent now
    logprobs: list | None = None          # a `Logprobs` for each new token, if asked for
    finish_reason: str | None = None      # None while the sample goes on; 'stop', 'length', 'abort' or 'error'
    # in the first output of a request: None for the first token of the prompt, which nothing predicts, then `Logprobs`
    prompt_logprobs: list | None = None
    n_cached: int | None = None           # likewise: how many tokens of the prompt were found in remembered blocks
    error: Exception | None = None        # with 'error'


def chunk_interval(n_requests):
    """
    Seconds between two chunks of a stream while there are so many requests, streamed or not. The engine delivers tokens
    as often as the server writes chunks.
    """
    return min(max(SHORTEST, n_requests / CHUNKS), LONGEST)
