"""
The objects of the API: what a body may hold, the `Request`s it asks for, and errors. The fields are those of OpenAI's
legacy completions (https://platform.openai.com/docs/api-reference/completions), with those that vLLM adds.
"""
import difflib
import random
from dataclasses import dataclass, fields
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, create_model

from serving.request import LARGEST_BIAS, MOST_SAMPLES, MOST_STOPS, Request, SamplingParams

MOST_PROMPTS = 128  # of one body
TYPES = {401: 'authentication_error', 429: 'rate_limit_error', 500: 'server_error', 503: 'service_unavailable'}
UNSUPPORTED = {
    'best_of': "ask for n samples, with logprobs to compare them, and choose one",
    'suffix': "this model continues a text, and cannot fill in the middle of one",
    'response_format': "this server does not constrain the form of a text: give an example of it in the prompt",
    'messages': "a base model has no chat template: write the conversation as a prompt",
}


class APIError(Exception):
    """An answer that is an error. param: the field of the body that is wrong. code: a word for programs."""

    def __init__(self, status, message, param=None, code=None, headers=None):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def json(self):
        """{"error": {message, type, param, code}}"""
        kind = TYPES.get(self.status, 'invalid_request_error')
        return {'error': {'message': str(self), 'type': kind, 'param': self.param, 'code': self.code}}


def checked_prompts(prompt):
    """A prompt as a list of texts or of lists of token ids. ValueError if it is neither one of those nor a list."""
    prompts = prompt if type(prompt) is list and prompt and type(prompt[0]) is not int else [prompt]
    kinds = {str if type(p) is str else list if type(p) is list and all(type(i) is int for i in p) else None
             for p in prompts}
    if len(kinds) > 1 or None in kinds:
        raise ValueError("prompt should be a text, a list of token ids, a list of texts or a list of such lists")
    if len(prompts) > MOST_PROMPTS:
        raise ValueError(f"prompt should be at most {MOST_PROMPTS} prompts, not {len(prompts)}: send several requests")
    if not all(prompts):
        raise ValueError("prompt should have at least one token: start from a newline, for example")
    return prompts


def checked_stop(stop):
    """Stop strings as a list. ValueError if they are too many, too long or empty."""
    stops = stop if type(stop) is list else [stop]
    if len(stops) > MOST_STOPS or not all(type(s) is str and 1 <= len(s) <= 1000 for s in stops):
        raise ValueError(f"stop should be a text of 1 to 1000 characters, or a list of at most {MOST_STOPS} of them")
    return stops


PROMPT_SCHEMA = {'anyOf': [
    {'type': 'string', 'minLength': 1},
    {'type': 'array', 'minItems': 1, 'items': {'type': 'integer', 'minimum': 0}},
    {'type': 'array', 'minItems': 1, 'maxItems': MOST_PROMPTS, 'items': {'type': 'string', 'minLength': 1}},
    {'type': 'array', 'minItems': 1, 'maxItems': MOST_PROMPTS,
     'items': {'type': 'array', 'minItems': 1, 'items': {'type': 'integer', 'minimum': 0}}},
]}
ONE_STOP = {'type': 'string', 'minLength': 1, 'maxLength': 1000}
STOP_SCHEMA = {'anyOf': [ONE_STOP, {'type': 'array', 'maxItems': MOST_STOPS, 'items': ONE_STOP}]}
TokenId = Annotated[int, Field(ge=0)]


class Body(BaseModel):
    """A JSON object that has these fields and no others, each of the type it says."""
    model_config = ConfigDict(extra='forbid', strict=True, allow_inf_nan=False)
    model: str = Field('', description="the name that GET /v1/models gives; it may be left out")


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra='forbid', strict=True)
    include_usage: bool = Field(False, description="end the stream with a chunk that has the usage and no choices")


SETTINGS = {each.name: (each.type, Field(each.default, **each.metadata))
            for each in fields(SamplingParams) if each.metadata}  # that are the same in a body as in `SamplingParams`
Bias = Annotated[float, Field(ge=-LARGEST_BIAS, le=LARGEST_BIAS)]


class CompletionBody(create_model('SamplingBody', __base__=Body, **SETTINGS)):
    """The body of POST /v1/completions."""
    prompt: Annotated[list, BeforeValidator(checked_prompts), WithJsonSchema(PROMPT_SCHEMA)]
    max_tokens: int = Field(16, ge=0)
    n: int = Field(1, ge=1, le=MOST_SAMPLES, description="samples of each prompt")
    seed: int | None = Field(None, ge=0, lt=2**63, description="sample i of a prompt draws with seed + i")
    stop: Annotated[list, BeforeValidator(checked_stop), WithJsonSchema(STOP_SCHEMA)] = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=128)
    logit_bias: dict[str, Bias] = Field(default_factory=dict)
    echo: bool = Field(False, description="with logprobs, the prompt is scored; max_tokens may then be 0")
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    return_token_ids: bool = Field(False, description="add token_ids and prompt_token_ids to the choices")
    cache_salt: str = Field('', max_length=256, description="prompts share blocks with those of the same salt only")
    user: str = Field('', description="has no effect")


class TokenizeBody(Body):
    """The body of POST /tokenize."""
    prompt: str


class DetokenizeBody(Body):
    """The body of POST /detokenize."""
    tokens: list[TokenId]


def parsed(kind, data):
    """The body of this kind in the bytes of a request. APIError 400, which names the field, if it is not one."""
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError as e:
        raise APIError(400, f"the body should be a JSON object: {e}", code='invalid_json') from None
    if type(fields) is not dict:
        raise APIError(400, f"the body should be a JSON object, not {data[:20].decode('utf-8', 'replace')!r}")
    known = kind.model_fields.keys()
    fields = {name: value for name, value in fields.items() if value is not None or name not in known | UNSUPPORTED}
    try:
        return kind.model_validate(fields)
    except ValidationError as e:
        raise named(e.errors(include_url=False)[0], known) from None


def named(error, known):
    """The APIError of one of pydantic's errors. known: the fields that there are."""
    param = '.'.join(str(part) for part in error['loc'])
    value = repr(error['input'])
    value = value if len(value) <= 60 else value[:45] + '...'
    if error['type'] == 'extra_forbidden':
        near = difflib.get_close_matches(param, known, n=1) if len(error['loc']) == 1 else ()
        advice = UNSUPPORTED.get(param) or (f"did you mean {near[0]}?" if near else "leave it out")
        return APIError(400, f"{param} is not a field here: {advice}", param, 'unknown_field')
    if error['type'] == 'missing':
        return APIError(400, f"{param} is missing: the body must have it", param, 'missing_field')
    if error['type'] == 'value_error':  # of a function above
        return APIError(400, str(error['ctx']['error']), param, 'invalid_value')
    message = error['msg'].replace('Input', param, 1)
    return APIError(400, f"{message if param in message else param + ': ' + message}, not {value}", param,
                    'invalid_value')


@dataclass(frozen=True)
class Served:
    """
    The model that is served: its name, its tokenizer, the bytes of each token id (a list of vocab_size), and the most
    tokens that a request may have with its answer.
    """
    name: str
    tokenizer: object
    token_bytes: list
    max_tokens: int
    created: int = 0

    def check_name(self, model):
        """APIError 404 unless the model is this one, or not named."""
        if model not in ('', self.name):
            raise APIError(404, f"there is no model {model[:100]!r} here: the one that is served is {self.name!r}",
                           'model', 'model_not_found')

    def encode(self, text, param='prompt'):
        """Token ids of a text. APIError 400 for characters that the tokenizer does not know and for very long texts."""
        longest = max(map(len, self.token_bytes))
        if len(text) > self.max_tokens * longest:  # so long that reading it all would only take time
            raise too_long(f"{param} has {len(text):,} characters, which are more than {self.max_tokens:,} tokens",
                           param)
        try:
            return self.tokenizer.encode(text)
        except ValueError as e:
            raise APIError(400, f"{param} has {e}", param, 'invalid_value') from None

    def decode(self, tokens):
        """The text of token ids."""
        return b''.join(map(self.token_bytes.__getitem__, tokens)).decode('utf-8', 'replace')

    def check_ids(self, tokens, param):
        """APIError 400 unless all ids are of the vocabulary."""
        wrong = next((i for i in tokens if not 0 <= i < len(self.token_bytes)), None)
        if wrong is not None:
            raise APIError(400, f"{param} should have token ids from 0 to {len(self.token_bytes) - 1}, not {wrong}",
                           param, 'invalid_value')
        return tokens


def too_long(message, param='prompt'):
    """The APIError for what is longer than the model's context or the pool of blocks."""
    return APIError(400, message, param, 'context_length_exceeded')


def requests_of(body, served, id, delivers):
    """
    A `Request` for each prompt of a `CompletionBody`. APIError where a value does not fit the model.

    delivers: the `deliver` of each prompt. A body without a seed gets one for each prompt, drawn here.
    """
    served.check_name(body.model)
    if body.stream_options.include_usage and not body.stream:
        raise APIError(400, "stream_options is for streams: add stream, or leave it out", 'stream_options',
                       'invalid_value')
    prompts = [served.encode(prompt) if type(prompt) is str else served.check_ids(prompt, 'prompt')
               for prompt in body.prompt]
    longest = max(map(len, prompts))
    if longest + body.max_tokens > served.max_tokens:
        raise too_long(f"the prompt has {longest:,} tokens and max_tokens is {body.max_tokens:,}, together more than "
                       f"the {served.max_tokens:,} that a request may have: shorten one of them")
    seeds = [random.randrange(2**63 - MOST_SAMPLES) if body.seed is None else body.seed for _ in prompts]
    try:
        params = SamplingParams(
            **{name: getattr(body, name) for name in SETTINGS}, logit_bias=biases(body.logit_bias, served),
            stop_token_ids=tuple(served.check_ids(body.stop_token_ids, 'stop_token_ids')),
            prompt_logprobs=body.echo and body.logprobs is not None)
        return [Request(id=f'{id}-{i}', prompt=tokens, max_tokens=body.max_tokens, params=params, seed=seed, n=body.n,
                        stop=tuple(body.stop), cache_salt=body.cache_salt, deliver=deliver)
                for i, (tokens, seed, deliver) in enumerate(zip(prompts, seeds, delivers))]
    except ValueError as e:  # it begins with the name of the field
        param = str(e).split()[0]
        raise APIError(400, str(e), param if param in CompletionBody.model_fields else None, 'invalid_value') from None


def biases(logit_bias: dict[str, Any], served):
    """((token id, bias), ...) of a body's logit_bias, in the order of the ids."""
    try:
        pairs = sorted((int(token), bias) for token, bias in logit_bias.items())
    except ValueError:
        raise APIError(400, "logit_bias should have token ids as its keys, such as {\"11\": -100}", 'logit_bias',
                       'invalid_value') from None
    served.check_ids([token for token, _ in pairs], 'logit_bias')
    return tuple(pairs)
