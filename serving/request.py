"""
What a client asks for: a `Request` with its `SamplingParams`. What it gets: `Output`s, and how often it gets them.
"""
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import NamedTuple

MOST_LOGPROBS = 5  # tokens besides the sampled one
MOST_STOPS = 4
MOST_SAMPLES = 128
LARGEST_BIAS = 100
PAUSE, LONGEST_PAUSE = 0.04, 0.2  # seconds between two chunks of a stream, at least and at most
CHUNKS = 400  # the number of chunks that all streams together write in a second: each chunk takes time from the model

LIMITS = {'ge': (operator.ge, 'at least'), 'gt': (operator.gt, 'above'), 'le': (operator.le, 'at most'),
          'lt': (operator.lt, 'below')}  # of the values of a setting, by the names that pydantic has for them


def check(name, value, fits, expected):
    if not fits:
        raise ValueError(f"{name} must be {expected}, not {value!r}")


def setting(default, description=None, **limits):
    """
    A field of `SamplingParams` that the body of the API has too, with the same default and limits, see `LIMITS`.
    description: for readers of the API.
    """
    return field(default=default, metadata={'description': description, **limits})


@dataclass(frozen=True)
class SamplingParams:
    """
    How the tokens of a sample are drawn, and when they end. The name and the fields are those of vLLM.

    temperature divides the logits; 0 takes the largest. top_k: keep the k largest, 0 or -1 for all. top_p: keep the
    fewest that hold this much probability. min_p: keep those with at least this share of the largest probability; it
    comes first, then top_k, then top_p.
    presence_penalty, frequency_penalty: subtracted from the logit of a token that was generated, once and for each
    time. repetition_penalty: divides the positive logits of all tokens of prompt and sample, multiplies the negative.
    min_tokens: so many tokens are generated before one of the stop tokens can be drawn. ignore_eos: the engine's
    eos_token ends nothing.
    logprobs: None, or how many of the likeliest tokens are reported beside each one that was drawn. Log probabilities
    are those of the model, before all of the above.
    logit_bias: pairs (token id, number that is added to its logit). stop_token_ids: further tokens that end a sample.
    prompt_logprobs: report them for each token of the prompt also. Such a request computes every logit that it reports.

    ValueError on values that make no sense.
    """
    temperature: float = setting(1.0, "0 takes the likeliest token each time", ge=0)
    top_p: float = setting(1.0, gt=0, le=1)
    top_k: int = setting(0, "draw from the k likeliest tokens; 0 and -1 draw from all", ge=-1, lt=2**31)
    min_p: float = setting(0.0, ge=0, le=1)
    presence_penalty: float = setting(0.0, ge=-2, le=2)
    frequency_penalty: float = setting(0.0, ge=-2, le=2)
    repetition_penalty: float = setting(1.0, ge=0.01, le=100)
    min_tokens: int = setting(0, ge=0)
    ignore_eos: bool = setting(False)
    logprobs: int | None = setting(None, ge=0, le=MOST_LOGPROBS)
    logit_bias: tuple = ()
    stop_token_ids: tuple = ()
    prompt_logprobs: bool = False

    def __post_init__(self):
        for name, holds, words, bound in LIMITED:
            value = getattr(self, name)
            if value is not None and not holds(value, bound):
                raise ValueError(f"{name} must be {words} {bound}, not {value!r}")
        # a smaller temperature would make infinite numbers of logits
        check('temperature', self.temperature, self.temperature == 0 or 1e-30 < self.temperature < math.inf,
              "0 (greedy) or positive, above 1e-30")
        for _, bias in self.logit_bias:
            check('logit_bias', bias, abs(bias) <= LARGEST_BIAS, f"numbers in [-{LARGEST_BIAS}, {LARGEST_BIAS}]")


LIMITED = [(each.name, *LIMITS[limit], bound) for each in fields(SamplingParams)
           for limit, bound in each.metadata.items() if limit in LIMITS]


@dataclass(eq=False)
class Request:
    """
    A prompt and its n samples. Sample i draws with seed + i; a draw is a function of that number and of how many tokens
    were generated before.

    prompt: token ids. max_tokens: of each sample; 0 computes the prompt only. stop: strings that end a sample, which
    are not a part of its text. cache_salt: only requests with the same one share what is remembered.
    deliver: called in the engine's thread with a list of `Output`s, at most once a step; it must return at once.

    ValueError on values that make no sense.
    """
    id: str
    prompt: list
    max_tokens: int = 16
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    n: int = 1
    stop: tuple = ()
    cache_salt: str = ''
    deliver: Callable = field(default=lambda outputs: None, repr=False)

    def __post_init__(self):
        if not self.prompt:
            raise ValueError("the prompt has no tokens: it must have at least one, for example a newline")
        check('max_tokens', self.max_tokens, self.max_tokens >= 0, "at least 0")
        check('min_tokens', self.params.min_tokens, self.params.min_tokens <= self.max_tokens,
              f"at most max_tokens, {self.max_tokens}")
        check('n', self.n, 1 <= self.n <= MOST_SAMPLES, f"1 to {MOST_SAMPLES}")
        check('stop', self.stop, len(self.stop) <= MOST_STOPS and all(self.stop),
              f"at most {MOST_STOPS} strings, none of them empty")
        check('seed', self.seed, -2**63 <= self.seed < 2**64, "a 64-bit integer")

    def check_tokens(self, vocab_size):
        """ValueError unless all token ids are in a vocabulary."""
        for name, ids in (('prompt', self.prompt), ('stop_token_ids', self.params.stop_token_ids),
                          ('logit_bias', [token for token, _ in self.params.logit_bias])):
            wrong = [token for token in ids if not 0 <= token < vocab_size]
            if wrong:
                raise ValueError(f"{name} has the token id {wrong[0]}, and the vocabulary has the ids 0 to "
                                 f"{vocab_size - 1}")


class Logprobs(NamedTuple):
    """
    The log probability of a token, and the `top` likeliest instead of it, as pairs (token id, log probability) from the
    likeliest on. rank: 1 for the likeliest token.
    """
    token: int
    logprob: float
    rank: int
    top: list


class Output(NamedTuple):
    """
    The new tokens and the new text of one sample, after one step or several.

    index: the number of the sample in its request. token_ids: the new tokens; of a sample that ended at a stop token,
    that one too. text: what may be sent now. logprobs: a `Logprobs` for each new token, or None if not asked for.
    finish_reason: None while the sample goes on; 'stop', 'length', 'abort' or 'error'.
    prompt_logprobs: in the first output of a request that asked: None for the first token of the prompt, which nothing
    predicts, and a `Logprobs` for each other one. n_cached: in the first output: how many tokens of the prompt were
    found in remembered blocks.
    error: with 'error', what happened.
    """
    index: int
    token_ids: list
    text: str = ''
    logprobs: list | None = None
    finish_reason: str | None = None
    prompt_logprobs: list | None = None
    n_cached: int | None = None
    error: str | None = None


def pause(n_streams):
    """
    Seconds between two chunks of a stream, if there are n_streams streams. The engine delivers tokens as often as the
    server writes chunks.
    """
    return min(max(PAUSE, n_streams / CHUNKS), LONGEST_PAUSE)
