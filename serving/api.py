"""
The objects of the API: what a body may hold, the `Request`s it asks for, and errors. The fields are those of OpenAI's
legacy completions and chat completions (https://platform.openai.com/docs/api-reference), with those that vLLM adds.
"""
import difflib
import random
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

import orjson
from pydantic import AfterValidator, Field, ValidationError, WrapValidator

from serving.request import MOST_LOGPROBS, Request, SamplingFields, SamplingParams, Strict, TokenId

MOST_PROMPTS, MOST_SAMPLES, MOST_STOPS, MOST_MESSAGES = 128, 128, 4, 2048  # of one body
TYPES = {401: 'authentication_error', 429: 'rate_limit_error', 500: 'server_error', 503: 'service_unavailable'}
UNSUPPORTED = {
    'best_of': "ask for n samples, with logprobs to compare them, and choose one",
    'suffix': "this model continues a text, and cannot fill in the middle of one",
    'response_format': "this server does not constrain the form of a text: give an example of it in the prompt",
    'messages': "POST them to /v1/chat/completions",
    'tools': "this server calls no functions: describe them in a message",
    'audio': "this model reads and writes text only",
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


def invalid(param, message):
    """The APIError for a field with a wrong value."""
    return APIError(400, message, param, 'invalid_value')


def says(message):
    """A pydantic validator with one message for all that is wrong: an error of a union would have one for each type."""
    def validated(value, validate):
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(message) from None
    return WrapValidator(validated)


def listed(value):
    """A list of what may be given alone: texts, or lists of token ids."""
    return [value] if type(value) is str or value and type(value[0]) is int else value


def list_of(kind, **limits):
    return Annotated[list[kind], Field(fail_fast=True, **limits)]


Text = Annotated[str, Field(min_length=1)]
Tokens = list_of(TokenId, min_length=1)
Prompts = Annotated[
    Text | Tokens | list_of(Text, min_length=1, max_length=MOST_PROMPTS)
    | list_of(Tokens, min_length=1, max_length=MOST_PROMPTS), AfterValidator(listed),
    says("prompt should be a text, a list of token ids, or a list of such texts or lists, at most "
         f"{MOST_PROMPTS}; each should have at least one token, for example a newline")]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Stops = Annotated[Stop | list_of(Stop, max_length=MOST_STOPS), AfterValidator(listed),
                  says(f"stop should be a text of 1 to 1000 characters, or a list of at most {MOST_STOPS} of them")]


class Body(Strict):
    """The body of a request, a JSON object."""
    model: str = Field('', description="the name that GET /v1/models gives; it may be left out")


class StreamOptions(Strict):
    include_usage: bool = Field(False, description="end the stream with a chunk that has the usage and no choices")


class GenerationBody(Body, SamplingFields):
    """What the bodies of completions and of chat completions share."""
    n: int = Field(1, ge=1, le=MOST_SAMPLES, description="samples of each prompt")
    seed: int | None = Field(None, ge=0, lt=2**63, description="sample i of a prompt draws with seed + i")
    stop: Stops = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    return_token_ids: bool = Field(False, description="add token_ids and prompt_token_ids to the choices")
    cache_salt: str = Field('', max_length=256, description="prompts share blocks with those of the same salt only")
    user: str = Field('', description="has no effect")


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""
    prompt: Prompts
    max_tokens: int = Field(16, ge=0)
    echo: bool = Field(False, description="with logprobs, the prompt is scored; max_tokens may then be 0")

    @property
    def prompt_logprobs(self):
        """See `SamplingParams`."""
        return self.echo and self.logprobs is not None

    @property
    def params(self):
        """Its `SamplingParams`."""
        return self


class TextPart(Strict):
    type: Literal['text']
    text: str


class Message(Strict):
    """A message of a conversation. The texts of several parts follow each other on lines of their own."""
    role: Literal['system', 'user', 'assistant']
    content: Annotated[str | list[TextPart], says("content should be a text, or a list of parts of the type text")]
    name: str = Field('', description="has no effect")

    def plain(self):
        """The message as templates know it."""
        text = self.content if type(self.content) is str else '\n'.join(part.text for part in self.content)
        return {'role': self.role, 'content': text}


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""
    messages: list_of(Message, min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=0, description="by default as many as there is room for")
    max_tokens: int | None = Field(None, ge=0, description="the older name of max_completion_tokens")
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS, description="with logprobs")

    @property
    def params(self):
        """Its `SamplingParams`."""
        fields = {name: getattr(self, name) for name in SamplingFields.model_fields if name != 'logprobs'}
        return SamplingParams(**fields, logprobs=self.top_logprobs if self.logprobs else None)


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
    param = '.'.join(str(part) for part in error['loc'] if part != '[key]')  # that it is of a name in an object
    value = repr(error['input'])
    value = value if len(value) <= 60 else value[:45] + '...'
    if error['type'] == 'extra_forbidden':
        near = difflib.get_close_matches(param, known, n=1) if len(error['loc']) == 1 else ()
        advice = UNSUPPORTED.get(param) or (f"did you mean {near[0]}?" if near else "leave it out")
        return APIError(400, f"{param} is not a field here: {advice}", param, 'unknown_field')
    if error['type'] == 'missing':
        return APIError(400, f"{param} is missing: the body must have it", param, 'missing_field')
    if error['type'] == 'value_error':  # of a function above
        return invalid(param, str(error['ctx']['error']))
    message = error['msg'].replace('Input', param, 1)
    return invalid(param, f"{message if param in message else param + ': ' + message}, not {value}")


@dataclass(frozen=True)
class Served:
    """
    The model that is served: its name, its tokenizer, the bytes of each token id (a list of vocab_size), and the most
    tokens that a request may have with its answer. defaults: of the sampling fields that a body leaves out, see
    `formats.pretrained.generation_defaults`.
    """
    name: str
    tokenizer: object
    token_bytes: list
    max_tokens: int
    created: int = 0
    defaults: dict = field(default_factory=dict)

    def check_name(self, model):
        """APIError 404 unless the model is this one, or not named."""
        if model not in ('', self.name):
            raise APIError(404, f"there is no model {model[:100]!r} here: the one that is served is {self.name!r}",
                           'model', 'model_not_found')

    @cached_property
    def most_characters(self):
        """A longer text has more than max_tokens. Reading all of it would only take time."""
        return self.max_tokens * max(map(len, self.token_bytes))

    def encode(self, text):
        """Token ids of a prompt's text. APIError 400 if it is very long or has characters that the tokenizer lacks."""
        if len(text) > self.most_characters:
            raise too_long(f"prompt has {len(text):,} characters, which are more than {self.max_tokens:,} tokens")
        try:
            return self.tokenizer.encode(text)
        except ValueError as e:
            raise invalid('prompt', f"prompt has {e}") from None

    def conversation(self, messages):
        """
        Token ids of a conversation, a list of `Message`s. APIError 404 if the model has no chat template, 400 if the
        template does not take this conversation, or if it is very long.
        """
        if self.tokenizer.chat_template is None:
            raise APIError(404, "this model has no chat, because its tokenizer has no chat template: write the "
                                "conversation as a prompt, and POST it to /v1/completions")
        messages = [message.plain() for message in messages]
        n = sum(len(message['content']) for message in messages)
        if n > self.most_characters:
            raise too_long(f"messages have {n:,} characters, which are more than {self.max_tokens:,} tokens")
        try:
            return self.tokenizer.conversation(messages)
        except ValueError as e:
            raise invalid('messages', str(e)) from None


def too_long(message):
    """The APIError for what is longer than the model's context or the pool of blocks."""
    return APIError(400, message, 'prompt', 'context_length_exceeded')


def requests_of(body, served, id, delivers):
    """
    A `Request` for each prompt of a `CompletionBody`, or the one of a `ChatBody`. APIError where a value does not fit
    the model.

    delivers: the `deliver` of each. A body without a seed gets one for each prompt, drawn here.
    """
    if body.stream_options.include_usage and not body.stream:
        raise invalid('stream_options', "stream_options is for streams: add stream, or leave it out")
    n_new = body.max_tokens
    if isinstance(body, ChatBody):
        prompts = [served.conversation(body.messages)]
        n_new = n_new if body.max_completion_tokens is None else body.max_completion_tokens
        n_new = max(0, served.max_tokens - len(prompts[0])) if n_new is None else n_new
        if body.top_logprobs and not body.logprobs:
            raise invalid('top_logprobs', "top_logprobs needs logprobs: add it, or leave both out")
    else:
        prompts = [served.encode(prompt) if type(prompt) is str else prompt for prompt in body.prompt]
    seeds = [random.randrange(2**63 - MOST_SAMPLES) if body.seed is None else body.seed for _ in prompts]
    try:
        requests = [Request(f'{id}-{i}', tokens, n_new, body.params, seed, body.n, tuple(body.stop), body.cache_salt,
                            deliver)
                    for i, (tokens, seed, deliver) in enumerate(zip(prompts, seeds, delivers))]
        for request in requests:
            request.check_tokens(len(served.token_bytes))
    except ValueError as e:  # it begins with the name of the field
        raise invalid(str(e).split()[0], str(e)) from None
    return requests
