"""What a client asks for: a `Request` with its `SamplingParams`; and what it gets step by step: `Output`s."""
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_LOGPROBS = 5  # tokens besides the sampled one
MOST_STOPS = 4
MOST_SAMPLES = 128


def check(name, value, fits, expected):
    if not fits:
        raise ValueError(f"{name} must be {expected}, not {value!r}")


@dataclass(frozen=True)
class SamplingParams:
    """
    How the tokens of a sample are drawn, and when they end. The name and the fields are those of vLLM.

    temperature divides the logits; 0 takes the largest. top_k: keep the k largest, 0 for all. top_p: keep the fewest
    that hold this much probability. min_p: keep those with at least this share of the largest probability; it comes
    first, then top_k, then top_p.
    presence_penalty, frequency_penalty: subtracted from the logit of a token that was generated, once and for each
    time. repetition_penalty: divides the positive logits of all tokens of prompt and sample, multiplies the negative.
    logit_bias: pairs (token id, number that is added to its logit).
    min_tokens: so many tokens are generated before one of the stop tokens can be drawn. ignore_eos: the engine's
    eos_token ends nothing. stop_token_ids: further tokens that end a sample.
    logprobs: None, or how many of the likeliest tokens are reported beside each one that was drawn. Log probabilities
    are those of the model, before all of the above.
    prompt_logprobs: report them for each token of the prompt also. Such a request computes every logit that it reports.

    ValueError on values that make no sense.
    """
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False

    def __post_init__(self):
        # a temperature below 1e-30 would make infinite numbers of logits
        check('temperature', self.temperature, self.temperature == 0 or 1e-30 < self.temperature < math.inf,
              "0 (greedy) or positive, above 1e-30")
        check('top_p', self.top_p, 0 < self.top_p <= 1, "in (0, 1]; 1 draws from all tokens")
        check('top_k', self.top_k, 0 <= self.top_k < 2**31, "0 (all tokens) or positive")
        check('min_p', self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        for name in ('presence_penalty', 'frequency_penalty'):
            check(name, getattr(self, name), -2 <= getattr(self, name) <= 2, "in [-2, 2]")
        check('repetition_penalty', self.repetition_penalty, 0.01 <= self.repetition_penalty <= 100, "in [0.01, 100]")
        check('logprobs', self.logprobs, self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS,
              f"None or 0 to {MOST_LOGPROBS}")
        check('min_tokens', self.min_tokens, self.min_tokens >= 0, "at least 0")
        for _, bias in self.logit_bias:
            check('logit_bias', bias, -100 <= bias <= 100, "numbers in [-100, 100]")


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
