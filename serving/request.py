"""What a client asks for: a `Request`. What it gets: `Output`s, and how often it gets them."""
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

SHORTEST, LONGEST = 0.04, 0.2  # seconds between two chunks of a stream, at least and at most
CHUNKS = 400  # the number of chunks that all streams together write in a second: each chunk takes time from the model


@dataclass(eq=False)
class Request:
    """
    A prompt and its n samples. Sample i draws with seed + i.

    prompt: token ids. max_tokens: of each sample; 0 computes the prompt only. draw: how they are drawn, settings of
    `decode.draw.DrawSettings` by name, also min_tokens and logit_bias; what is left out has its default.
    stop: strings that end a sample. stop_token_ids: further tokens that end one; with ignore_eos the engine's
    end_tokens end nothing. include_stop: the stop string or the stop token that ends a sample is a part of its text.
    skip_special: special tokens have no text. strip: leave out the blank with which a text begins.
    logprobs: None, or how many of the likeliest tokens are reported beside each one that was drawn. Log probabilities
    are those of the model, before anything is done to its logits. prompt_logprobs: report them for each token of the
    prompt also; it is computed from its first token on then.
    constraint: None, or the form of the texts, a `constraints.Constraint`.
    cache_salt: only requests with the same one share what is remembered.
    deliver: called in the engine's thread with a list of `Output`s, at most once a call; it must return at once.
    """
    id: str
    prompt: list
    max_tokens: int = 16
    seed: int = 0
    n: int = 1
    draw: dict = field(default_factory=dict)
    stop: tuple = ()
    stop_token_ids: list = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: bool = False
    cache_salt: str = ''
    deliver: Callable = field(default=lambda outputs: None, repr=False)
    include_stop: bool = False
    skip_special: bool = True
    strip: bool = False
    constraint: object | None = None


class Logprobs(NamedTuple):
    """
    The log probability of a token, and the `top` likeliest instead of it, as pairs (token id, log probability) from the
    likeliest on.
    """
    logprob: float
    top: list


class Output(NamedTuple):
    """
    The new tokens and the new text of one sample, after one call or several.

    index: the number of the sample in its request. token_ids: the new tokens; of a sample that ended at a stop token,
    that one too. text: what may be sent now. logprobs: a `Logprobs` for each new token, or None if not asked for.
    finish_reason: None while the sample goes on; 'stop', 'length', 'abort' or 'error'.
    prompt_logprobs: in the first output of a request that asked: None for the first token of the prompt, which nothing
    predicts, and a `Logprobs` for each other one. n_cached: in the first output: how many tokens of the prompt were
    found in remembered blocks.
    error: with 'error', the exception.
    """
    index: int
    token_ids: list
    text: str = ''
    logprobs: list | None = None
    finish_reason: str | None = None
    prompt_logprobs: list | None = None
    n_cached: int | None = None
    error: Exception | None = None


def chunk_interval(n_requests):
    """
    Seconds between two chunks of a stream while there are so many requests, streamed or not. The engine delivers tokens
    as often as the server writes chunks.
    """
    return min(max(SHORTEST, n_requests / CHUNKS), LONGEST)
