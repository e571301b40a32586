"""
What a client asks for: a `Request` with its `SamplingParams`. What it gets: `Output`s, and how often it gets them.
"""
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

MOST_LOGPROBS = 20  # tokens besides the sampled one
MOST_TOKENS, MOST_BIASES = 2**31, 2**16  # of a request
PAUSE, LONGEST_PAUSE = 0.04, 0.2  # seconds between two chunks of a stream, at least and at most
CHUNKS = 400  # the number of chunks that all streams together write in a second: each chunk takes time from the model


def checked_temperature(temperature):
    if 0 < temperature <= 1e-30:
        raise ValueError("temperature should be 0 (greedy) or above 1e-30: a smaller one makes infinite logits")
    return temperature


def whole(number):
    """A float without a fraction as an int: some clients write 5.0."""
    return int(number) if type(number) is float and number.is_integer() and abs(number) < 2**63 else number


def checked_biases(biases):
    """A dict of biases itself. ValueError for the first one that is wrong: pydantic would collect all of them."""
    if type(biases) is dict:
        if len(biases) > MOST_BIASES:
            raise ValueError(f"logit_bias has {len(biases):,} tokens, and at most {MOST_BIASES:,} are allowed: give "
                             "fewer")
        for token, bias in biases.items():
            is_id = re.fullmatch('[0-9]{1,19}', str(token)[:20])
            if not is_id or type(bias) not in (int, float) or not -100 <= bias <= 100:
                raise ValueError("logit_bias should have token ids as names and numbers from -100 to 100 as values, "
                                 f"but {str(token)[:20]!r} is not so")
    return biases


Whole = Annotated[int, BeforeValidator(whole)]
TokenId = Annotated[int, Field(ge=0)]
NamedTokenId = Annotated[int, Field(ge=0, strict=False)]  # the names in a JSON object are texts
Bias = Annotated[float, Field(ge=-100, le=100)]


class Strict(BaseModel):
    """An object that has these fields and no others, each of the type it says."""
    model_config = ConfigDict(extra='forbid', strict=True, allow_inf_nan=False)


class Lenient(Strict):
    """An object that may have other fields too, which are ignored."""
    model_config = ConfigDict(extra='ignore')


class SamplingFields(Strict):
    """The fields of `SamplingParams` that the body of the API has too."""
    temperature: Annotated[float, AfterValidator(checked_temperature)] = Field(
        1.0, ge=0, description="0 takes the likeliest token each time")
    top_p: Annotated[float, AfterValidator(lambda p: p or 1e-9)] = Field(1.0, ge=0, le=1, description="0 takes the "
                                                                         "likeliest token each time")
    top_k: Whole = Field(0, ge=-1, lt=2**31, description="draw from the k likeliest tokens; 0 and -1 draw from all")
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    min_tokens: Whole = Field(0, ge=0, lt=MOST_TOKENS)
    ignore_eos: bool = False
    logprobs: Whole | None = Field(None, ge=0, le=MOST_LOGPROBS)
    logit_bias: Annotated[dict[NamedTokenId, Bias], BeforeValidator(checked_biases)] = Field(default_factory=dict)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=128, fail_fast=True)


class SamplingParams(SamplingFields):
    """
    How the tokens of a sample are drawn, and when they end. The name and the fields are those of vLLM.

    temperature divides the logits; 0 takes the largest. top_k: keep the k largest, 0 or -1 for all. top_p: keep the
    fewest that hold this much probability. min_p: keep those with at least this share of the largest probability; it
    comes first, then top_k, then top_p.
    presence_penalty, frequency_penalty: subtracted from the logit of a token that was generated, once and for each
    time. repetition_penalty: divides the positive logits of all tokens of prompt and sample, multiplies the negative.
    min_tokens: so many tokens are generated before one of the stop tokens can be drawn. ignore_eos: the engine's
    end_tokens end nothing.
    logprobs: None, or how many of the likeliest tokens are reported beside each one that was drawn. Log probabilities
    are those of the model, before all of the above.
    logit_bias: {token id: number that is added to its logit}. stop_token_ids: further tokens that end a sample.
    prompt_logprobs: report them for each token of the prompt also. Such a request computes every logit that it reports.

    ValueError (of pydantic) on values that make no sense.
    """
    prompt_logprobs: bool = False


@dataclass(eq=False)
class Request:
    """
    A prompt and its n samples. Sample i draws with seed + i; a draw is a function of that number and of how many tokens
    were generated before.

    prompt: token ids. max_tokens: of each sample; 0 computes the prompt only. stop: strings that end a sample.
    include_stop: the stop string or the stop token that ends a sample is a part of its text. skip_special: special
    tokens have no text. strip: leave out the blank with which a text begins. cache_salt: only requests with the same
    one share what is remembered.
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
    include_stop: bool = False
    skip_special: bool = True
    strip: bool = False

    def __post_init__(self):
        if not self.prompt:
            raise ValueError("prompt has no tokens: it must have at least one, for example a newline")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, not {self.n}")
        if self.params.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens, {self.max_tokens}, not {self.params.min_tokens}")

    def check_tokens(self, vocab_size):
        """ValueError unless all token ids are in a vocabulary. It begins with the name of the field."""
        for name, ids in (('prompt', self.prompt), ('stop_token_ids', self.params.stop_token_ids),
                          ('logit_bias', self.params.logit_bias)):
            check_ids(name, ids, vocab_size)


def check_ids(name, ids, vocab_size):
    """ValueError unless all token ids are in a vocabulary."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name} has the token id {token}, and the vocabulary has the ids 0 to {vocab_size - 1}")


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
