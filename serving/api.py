"""
The objects of the API: what a body may hold, the `Request`s it asks for, and errors. The fields are those of OpenAI's
legacy completions and chat completions (https://platform.openai.com/docs/api-reference), with those that vLLM adds.
"""
import difflib
import math
import re
import secrets
from codecs import BOM_UTF8
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

import orjson
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
    model_validator,
)

from chat.tools import MOST_CALLS, form_of, grammar, shows_tools
from decode.draw import NAMES
from serving.constraints import Vocabulary, compiled
from serving.grammars import json_rule
from serving.request import Request

MOST_LOGPROBS = 20  # tokens besides the drawn one
MOST_TOKENS, MOST_BIASES = 2**31, 2**16  # of a request
MOST_PROMPTS, MOST_SAMPLES, MOST_STOPS, MOST_CHOICES, MOST_MESSAGES = 128, 128, 256, 4096, 2048  # of one body
MOST_TOOLS = 128
MOST_FIELDS = 256             # of an object in a body, known or not
MOST_STOP_CHARACTERS = 2**15  # of all stop strings of a body
MOST_ENTRIES = 2**20          # of one answer: token ids and log probabilities, some 60 bytes each
TYPES = {401: 'authentication_error', 403: 'permission_error', 429: 'rate_limit_error', 500: 'server_error',
         503: 'service_unavailable'}
TOOLS = "this is for conversations: POST messages to /v1/chat/completions"
FORM = "response_format and structured_outputs say what form a text has"
TEMPLATE = "give it to the chat template: chat_template_kwargs, {\"enable_thinking\": false} for example"
KEPT = "this server keeps no answers: send the whole conversation as input"
LENGTH = "its name is max_tokens here, and max_output_tokens in /v1/responses"
UNSUPPORTED = {  # what asks for something that is not here; a body with several of them is told of the first one here
    'tools': TOOLS, 'functions': "its name is tools here", 'json_schema': FORM, 'grammar': FORM, 'guided_json': FORM,
    'guided_regex': FORM, 'guided_choice': FORM, 'guided_grammar': FORM, 'guided_decoding_backend': FORM,
    'messages': "POST them to /v1/chat/completions",
    'prompt': "POST it to /v1/completions",
    'content': "its name is prompt here",
    'input': "POST it to /v1/responses",
    'previous_response_id': KEPT, 'conversation': KEPT, 'background': "this server keeps no answers: stream this one",
    'truncation': "this server reads the whole input: shorten it",
    'modalities': "this model reads and writes text only",
    'audio': "this model reads and writes text only",
    'web_search_options': "this server searches nothing: write what is known in a message",
    'suffix': "this model continues a text, and cannot fill in the middle of one",
    'best_of': "ask for n samples, with logprobs to compare them, and choose one",
    'use_beam_search': "this server draws samples: ask for n of them, with logprobs to compare them",
    'store': "this server keeps no answers",
    'service_tier': "this server has one tier: leave it out",
    'reasoning_effort': TEMPLATE, 'reasoning': TEMPLATE, 'thinking': TEMPLATE, 'enable_thinking': TEMPLATE,
    'chat_template': "the template of the model's own files is used",
    'prompt_logprobs': "echo with logprobs scores a prompt",
    'repeat_penalty': "its name is repetition_penalty here",
    'n_predict': LENGTH, 'max_new_tokens': LENGTH, 'max_completion_tokens': LENGTH, 'max_tokens': LENGTH,
    'max_output_tokens': LENGTH,
    'tool_choice': TOOLS, 'function_call': "its name is tool_choice here",
}
IGNORED = {  # they change no token
    'user', 'metadata', 'verbosity', 'parallel_tool_calls', 'prompt_cache_key', 'prompt_cache_retention', 'usage',
    'prompt_cache_options', 'safety_identifier', 'include', 'max_tool_calls', 'spaces_between_special_tokens',
    'cache_prompt', 'prediction', 'include_reasoning', 'timings_per_token', 'repeat_last_n', 'mirostat_tau',
    'mirostat_eta', 'xtc_threshold', 'dynatemp_exponent'}
NOTHING = {  # the values with which a field asks for nothing, besides 0, false and empty ones
    'response_format': {'type': 'text'}, 'modalities': ['text'], 'service_tier': 'auto', 'truncation': 'disabled',
    'seed': -1, 'max_tokens': -1, 'max_completion_tokens': -1, 'reasoning_effort': 'none', 'length_penalty': 1,
    'repeat_penalty': 1, 'typical_p': 1, 'typical': 1, 'tfs_z': 1, 'id_slot': -1, 'n_predict': -1,
    'truncate_prompt_tokens': -1, 'logit_bias': [],
}
ASK_WHEN_EMPTY = {'web_search_options', 'prompt_logprobs', 'n_predict', 'max_new_tokens'}
GUIDED = {f'guided_{name}': name for name in ('json', 'regex', 'choice', 'grammar')}  # older names in vLLM
AS_IT_IS = {'schema', 'json', 'guided_json', 'tools'}  # fields in which null means something


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


def checked_stops(stops):
    """Stop strings without empty ones and nulls."""
    stops = [stop for stop in stops if stop]
    n = sum(map(len, stops))
    if n > MOST_STOP_CHARACTERS:
        raise ValueError(f"stop has {n:,} characters in all, and at most {MOST_STOP_CHARACTERS:,} are allowed: give "
                         "shorter ones")
    return stops


def number_of_likeliest(logprobs):
    """The legacy logprobs: true asks for one token beside each, as in vLLM, and false for none."""
    return {True: 1, False: None}[logprobs] if type(logprobs) is bool else logprobs


def whole(number):
    """A float without a fraction as an int: some clients write 5.0."""
    return int(number) if type(number) is float and number.is_integer() and abs(number) < 2**63 else number


def checked_biases(biases):
    """{token id: bias}. ValueError for the first one that is wrong: pydantic would collect all of them."""
    if type(biases) is dict:
        for token, bias in biases.items():
            is_id = re.fullmatch('[0-9]{1,19}', str(token)[:20])
            if not is_id or type(bias) not in (int, float) or not -100 <= bias <= 100:
                raise ValueError("logit_bias should have token ids as names and numbers from -100 to 100 as values, "
                                 f"but {str(token)[:20]!r} is not so")
        return {int(token): bias for token, bias in biases.items()}
    return biases


def text_of_schema(schema):
    """A JSON schema as text."""
    try:
        return schema if type(schema) is str else orjson.dumps(schema).decode()
    except TypeError:
        raise ValueError("the schema is nested too deeply") from None


Whole = Annotated[int, BeforeValidator(whole)]
TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Strict(BaseModel):
    """An object that has these fields and no others, each of the type it says."""
    model_config = ConfigDict(extra='forbid', strict=True, allow_inf_nan=False)


class Lenient(Strict):
    """An object that may have other fields too, which are ignored."""
    model_config = ConfigDict(extra='ignore')


Tokens = list_of(TokenId, min_length=1)
Prompts = Annotated[
    str | Tokens | list_of(str, min_length=1, max_length=MOST_PROMPTS)
    | list_of(Tokens, min_length=1, max_length=MOST_PROMPTS), AfterValidator(listed),
    says("prompt should be a text, a list of token ids, or a list of such texts or lists, at most "
         f"{MOST_PROMPTS}; each should have at least one token, for example a newline")]
Stops = Annotated[str | list_of(str | None, max_length=MOST_STOPS), AfterValidator(listed),
                  says(f"stop should be a text, or a list of at most {MOST_STOPS} texts"),
                  AfterValidator(checked_stops)]


class Body(Strict):
    """The body of a request, a JSON object."""
    model: str = Field('', description="the name that GET /v1/models gives; it may be left out")


class StreamOptions(Strict):
    include_usage: bool = Field(False, description="end the stream with a chunk that has the usage and no choices")
    include_obfuscation: bool = Field(False, description="has no effect")
    continuous_usage_stats: bool = Field(False, description="with include_usage, each chunk has the usage so far")


Schema = Annotated[str | dict, says("should be a JSON schema, an object or its text"), AfterValidator(text_of_schema)]


class SchemaFormat(Strict):
    name: str = Field('', max_length=256, description="has no effect")
    description: str = Field('', description="has no effect")
    schema_: Schema = Field(alias='schema')
    strict: bool = Field(False, description="has no effect: a schema always holds")


class ResponseFormat(Strict):
    """The form of the texts, as OpenAI names it."""
    type: Literal['text', 'json_object', 'json_schema']
    json_schema: SchemaFormat | None = None

    @model_validator(mode='after')
    def with_schema(self):
        if (self.type == 'json_schema') != (self.json_schema is not None):
            raise ValueError("response_format has json_schema where its type is json_schema, and nowhere else")
        return self


class StructuredOutputs(Strict):
    """The form of the texts, as vLLM names it."""
    json_: Schema | None = Field(None, alias='json')
    regex: str | None = None
    choice: list_of(str, min_length=1, max_length=MOST_CHOICES) | None = None
    grammar: str | None = Field(None, description="in llguidance's kind of Lark, or in llama.cpp's GBNF")
    json_object: bool = False


class GenerationBody(Body):
    """What the bodies of completions and of chat completions share: how samples are drawn, and what of them is sent."""
    temperature: Annotated[float, AfterValidator(lambda t: t if t > 1e-30 else 0.0)] = Field(  # no infinite logits
        1.0, ge=0, description="0 takes the likeliest token each time")
    top_p: Annotated[float, AfterValidator(lambda p: p or 1e-9)] = Field(1.0, ge=0, le=1, description="0 takes the "
                                                                         "likeliest token each time")
    top_k: Whole = Field(0, ge=-1, lt=2**31, description="draw from the k likeliest tokens; 0 and -1 draw from all")
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    min_tokens: Whole = Field(0, ge=0, lt=MOST_TOKENS)
    logit_bias: Annotated[dict[TokenId, Bias], BeforeValidator(checked_biases)] = Field(default_factory=dict,
                                                                                        max_length=MOST_BIASES)
    stop_token_ids: list_of(TokenId, max_length=128) = Field(default_factory=list)
    ignore_eos: bool = False
    n: Whole = Field(1, ge=1, le=MOST_SAMPLES, description="samples of each prompt")
    seed: Whole | None = Field(None, ge=-2**63, lt=2**63, description="sample i of a prompt draws with seed + i")
    stop: Stops = Field(default_factory=list)
    include_stop_str_in_output: bool = Field(False, description="what ends a sample is a part of its text")
    skip_special_tokens: bool = Field(True, description="special tokens, <|im_end|> for example, have no text")
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    return_token_ids: bool = Field(False, description="add token_ids and prompt_token_ids to the choices")
    cache_salt: str = Field('', max_length=256, description="prompts share blocks with those of the same salt only")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def forms(self):
        """What says the form of the texts: {field: (kind, text) of `constraints.compiled`}."""
        r, s = self.response_format or ResponseFormat(type='text'), self.structured_outputs or StructuredOutputs()
        found = {'response_format.type': ('json_object', '' if r.type == 'json_object' else None),
                 'response_format.json_schema.schema': ('json_schema', r.json_schema and r.json_schema.schema_),
                 'structured_outputs.json_object': ('json_object', '' if s.json_object else None),
                 'structured_outputs.json': ('json_schema', s.json_), 'structured_outputs.regex': ('regex', s.regex),
                 'structured_outputs.choice': ('choice', s.choice and tuple(s.choice)),
                 'structured_outputs.grammar': ('grammar', s.grammar)}
        return {field: form for field, form in found.items() if form[1] is not None}


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""
    prompt: Prompts
    max_tokens: Whole | None = Field(None, ge=0, lt=MOST_TOKENS, description="by default 16, or what there is room for")
    logprobs: Annotated[Whole | None, BeforeValidator(number_of_likeliest)] = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool = Field(False, description="with logprobs, the prompt is scored; max_tokens may then be 0")
    add_special_tokens: bool = Field(True, description="a BOS token before each text, if the tokenizer adds one")

    @property
    def n_logprobs(self):
        """The `logprobs` of its requests."""
        return self.logprobs


class Part(Lenient):
    """A part of a message."""
    type: Literal['text', 'input_text', 'output_text', 'refusal']
    text: str = Field(validation_alias=AliasChoices('text', 'refusal'))


def text_of(content, validate):
    """The text of a message's content. The texts of several parts follow each other on lines of their own."""
    try:
        content = validate(content)
    except ValidationError as e:  # the first error says that it is no str, the next one what is wrong with the list
        raise ValueError('this model reads text only: content should be a text, or a list of parts {"type": "text", '
                         f'"text": "..."}}, not {shown(e.errors()[1]["input"])}') from None
    return content if type(content) is str else '\n'.join(part.text for part in content)


def read_arguments(arguments):
    """The object that the arguments of a call are: templates take it as such, and the API as JSON in a text."""
    try:
        return orjson.loads(arguments or '{}') if type(arguments) is str else arguments
    except orjson.JSONDecodeError:
        raise ValueError(f"arguments should be an object of JSON as a text, not {shown(arguments)}") from None


class CalledFunction(Lenient):
    name: str
    arguments: Annotated[dict, BeforeValidator(read_arguments)]


class ToolCall(Lenient):
    """A call in a message of the assistant, as the API gave it."""
    id: str = ''
    type: Literal['function'] = 'function'
    function: CalledFunction


class Message(Lenient):
    """
    A message of a conversation. What a client adds to it is ignored (refusal, reasoning_content, annotations, for
    example), so the message of an answer can be sent back as it is. One of a tool answers the call with its id.
    """
    role: Literal['system', 'developer', 'user', 'assistant', 'tool']
    content: Annotated[str | list_of(Part), WrapValidator(text_of)]
    tool_calls: list_of(ToolCall, max_length=MOST_CALLS) = Field(default_factory=list)
    tool_call_id: str = ''
    name: str = ''

    @model_validator(mode='before')
    @classmethod
    def of_a_client(cls, message):
        if type(message) is not dict:
            return message
        if message.get('role') == 'function' or message.get('function_call'):
            raise ValueError("functions are tools here: send tool_calls, and their results with the role tool")
        if message.get('role') == 'assistant' and message.get('content') is None:  # of one that calls, or was cut
            return message | {'content': ''}
        return message

    def plain(self):
        """The message as templates know it."""
        plain = {'role': 'system' if self.role == 'developer' else self.role}
        if self.content or not self.tool_calls:
            plain['content'] = self.content
        if self.tool_calls:
            plain['tool_calls'] = [call.model_dump() for call in self.tool_calls]
        if self.role == 'tool':
            plain |= {name: text for name in ('tool_call_id', 'name') if (text := getattr(self, name))}
        return plain


class Function(Lenient):
    name: str = Field(pattern='^[a-zA-Z0-9_.:-]{1,64}$')
    description: str | None = None
    parameters: dict | None = Field(None, description="a JSON schema of its arguments, which are an object")


class OfFunction(Lenient):
    type: Literal['function']


class ToolFields(OfFunction):
    """A tool."""
    function: Function


def as_it_came(value, validate):
    """A pydantic validator that checks an object, and keeps it: the template gets all that the client wrote."""
    validate(value)
    return value


Tool = Annotated[ToolFields, WrapValidator(as_it_came)]


class ChosenFunction(Lenient):
    name: str


class ChosenTool(OfFunction):
    """The tool that an answer must call."""
    function: ChosenFunction


ToolChoice = Annotated[Literal['none', 'auto', 'required'] | ChosenTool, says(
    'tool_choice should be none, auto, required, or {"type": "function", "function": {"name": "..."}}')]


class ConversationFields(Strict):
    """How a conversation becomes the text of a prompt."""
    add_generation_prompt: bool | None = Field(None, description="end the prompt where an answer begins; by default "
                                                                 "true, unless a message is continued")
    continue_final_message: bool = Field(False, description="go on with the last message, of the assistant")
    chat_template_kwargs: dict = Field(default_factory=dict, description="more variables of the chat template, "
                                                                         "enable_thinking for example")
    documents: list_of(dict, max_length=MOST_MESSAGES) = Field(default_factory=list,
                                                               description="given to the chat template")
    tools: list_of(Tool, max_length=MOST_TOOLS) = Field(default_factory=list, description="that an answer may call")

    @property
    def variables(self):
        """What the template is given beside the messages. ValueError, which begins with the field that is wrong."""
        if self.continue_final_message and (self.add_generation_prompt or self.messages[-1].role != 'assistant'):
            raise ValueError("continue_final_message goes on with the assistant's last message: end messages with one, "
                             "and leave add_generation_prompt out")
        if reserved := {'self', 'messages', 'tools', 'continue_final_message'} & self.chat_template_kwargs.keys():
            raise ValueError(f"chat_template_kwargs has {', '.join(sorted(reserved))}: leave it out, or make it a "
                             "field of the body")
        given = dict(continue_final_message=self.continue_final_message)
        if self.add_generation_prompt is not None:
            given['add_generation_prompt'] = self.add_generation_prompt
        given |= {name: value for name in ('documents', 'tools') if (value := getattr(self, name))}
        return self.chat_template_kwargs | given


class ChatBody(GenerationBody, ConversationFields):
    """The body of POST /v1/chat/completions."""
    messages: list_of(Message, min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: Whole | None = Field(None, ge=0, lt=MOST_TOKENS,
                                                description="by default as many as there is room for")
    max_tokens: Whole | None = Field(None, ge=0, lt=MOST_TOKENS,
                                     description="the older name of max_completion_tokens")
    logprobs: bool = False
    top_logprobs: Whole = Field(0, ge=0, le=MOST_LOGPROBS, description="with logprobs")
    tool_choice: ToolChoice = Field('auto', description="none leaves the tools out")
    parallel_tool_calls: bool = Field(True, description="may an answer have several calls?")
    add_special_tokens: Literal[False] = Field(False, description="the template writes them")

    @property
    def n_logprobs(self):
        """The `logprobs` of its requests."""
        return self.top_logprobs if self.logprobs else None

    @property
    def callable_names(self):
        """Of the tools that an answer may call."""
        names = [tool['function']['name'] for tool in self.tools]
        return names if type(self.tool_choice) is str else [self.tool_choice.function.name]


class TokenizeBody(Body, ConversationFields):
    """The body of POST /tokenize: a prompt, or messages."""
    prompt: str | None = None
    messages: list_of(Message, min_length=1, max_length=MOST_MESSAGES) | None = None
    add_special_tokens: bool | None = Field(None, description="of a prompt, by default true")
    return_token_strs: bool = Field(False, description="add token_strs, the text of each token")


class DetokenizeBody(Body):
    """The body of POST /detokenize."""
    tokens: list_of(TokenId)


def parsed(kind, data, defaults=None):
    """
    The body of this kind in the bytes of a request. A field that is null, or asks for nothing, is left out; those of
    `defaults`, sampling fields, take the place of fields that are left out. APIError 400, which names the first field
    that is wrong.
    """
    if not data.strip():
        raise APIError(400, "the body is empty, but should be a JSON object", code='invalid_json')
    try:
        fields = orjson.loads(data.removeprefix(BOM_UTF8))
    except orjson.JSONDecodeError as e:
        raise APIError(400, f"the body should be a JSON object in UTF-8: {e}", code='invalid_json') from None
    if type(fields) is not dict:
        raise APIError(400, f"the body should be a JSON object, not {data[:20].decode('utf-8', 'replace')!r}")
    known = kind.model_fields.keys()
    try:
        fields = asked_for(without_nulls(fields), known)
        if 'structured_outputs' in known - fields.keys() and (older := GUIDED.keys() & fields.keys()):
            fields['structured_outputs'] = {GUIDED[name]: fields.pop(name) for name in older}
        if unknown := [name for name in fields if name not in known]:
            rank = {name: i for i, name in enumerate(UNSUPPORTED)}
            raise unknown_field(min(unknown, key=lambda name: rank.get(name, len(rank))), known)
        return kind.model_validate((defaults or {} if issubclass(kind, GenerationBody) else {}) | fields)
    except ValidationError as e:
        raise named(e.errors(include_url=False)[0], known) from None
    except RecursionError:
        raise APIError(400, "the body is nested too deeply: send plain values", code='invalid_json') from None


def without_nulls(fields, most=MOST_FIELDS):
    """An object of JSON without the fields that are null, at any depth. APIError 400 if it has more than so many."""
    if len(fields) > most:
        raise APIError(400, f"an object of the body has {len(fields):,} fields, and at most {most} are allowed: "
                            "send those that the server knows", code='unknown_field')
    kept = {}
    for name, value in fields.items():
        if type(value) is dict and name not in AS_IT_IS:
            value = without_nulls(value, math.inf if name == 'logit_bias' else MOST_FIELDS)
        elif (type(value) is list and value and type(value[0]) is dict and len(value) <= MOST_MESSAGES
              and name not in AS_IT_IS):
            value = [without_nulls(each) if type(each) is dict else each for each in value]
        if value is not None:
            kept[name] = value
    return kept


def asked_for(fields, known):
    """The fields of a body that ask for something. known: the fields that there are."""
    functions, choices = {'tools', 'functions'}, [fields.get('tool_choice'), fields.get('function_call')]
    left_out = IGNORED - known | {name for name, value in fields.items() if name in NOTHING and value == NOTHING[name]}
    # a field with a nearly known name may be a known one, misspelled
    left_out |= {name for name, value in fields.items() if not value and name not in known | ASK_WHEN_EMPTY
                 and not near(name, known, 0.85)}
    if fields.get('best_of') == fields.get('n', 1):
        left_out.add('best_of')
    if 'none' in choices or 'auto' in choices and not (functions - left_out) & fields.keys():
        left_out |= {*functions, 'tool_choice', 'function_call'}
    return {name: value for name, value in fields.items() if name not in left_out}


def near(name, known, cutoff):
    """The known field whose name is the most like this one, or ''."""
    return next(iter(difflib.get_close_matches(name, known, 1, cutoff)), '') if len(name) <= 40 else ''


def unknown_field(name, known):
    """The APIError for a field that is not among the known ones."""
    advice = UNSUPPORTED.get(name)
    if advice is None:
        advice = f"did you mean {alike}?" if (alike := near(name, known, 0.75)) else "leave it out"
        return APIError(400, f"{name[:60]} is not a field here: {advice}", name[:60], 'unknown_field')
    return APIError(400, f"{name[:60]}: {advice}", name[:60], 'unsupported_field')


def shown(value):
    """A value of JSON for an error, in at most some 60 characters, whatever its size and depth."""
    if type(value) in (list, dict):
        return f"a list of {len(value):,}" if type(value) is list else f"an object of {len(value):,}"
    text = repr(value[:46]) if type(value) is str else orjson.dumps(value).decode()
    return text if len(text) <= 60 else text[:45] + '...'


def named(error, known):
    """The APIError of one of pydantic's errors. known: the fields that there are."""
    param = '.'.join(str(part)[:60] for part in error['loc'])
    if error['type'] == 'extra_forbidden':  # in an object within the body
        return APIError(400, f"{param} is not a field here: leave it out", param, 'unknown_field')
    if error['type'] == 'missing':
        return APIError(400, f"{param} is missing or null: the body must have it", param, 'missing_field')
    message = re.sub('^(Input|List|String|Dictionary) ', f'{param} ', error['msg']).replace(' after validation', '')
    message = re.sub(r'a valid dictionary( or instance of \w+)?', 'an object', message)
    if error['type'] == 'value_error':  # of a function above
        message = str(error['ctx']['error'])
        return invalid(param, message if message.startswith(param) else f"{param}: {message}")
    if ', not ' not in message:
        message += f", not {shown(error['input'])}"
    return invalid(param, message if param in message else f"{param}: {message}")


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
    def vocabulary(self):
        """For `constraints.compiled`. ValueError where llguidance is not installed."""
        return Vocabulary(self.tokenizer, len(self.token_bytes))

    def constraint(self, forms):
        """The `Constraint` of the `forms` of a body, or None. APIError 400 for several, or one that cannot be had."""
        if len(forms) > 1:
            raise invalid(min(forms), f"{' and '.join(forms)} each say what form a text has: give one of them")
        for name, (kind, text) in forms.items():
            try:
                return compiled(kind, text, self.vocabulary)
            except ValueError as e:
                raise invalid(name, f"{name}: {e}") from None

    @cached_property
    def most_characters(self):
        """A longer text has more than max_tokens. Reading all of it would only take time."""
        return max(2**16, self.max_tokens * max(map(len, self.token_bytes)))

    def check_length(self, field, n_characters):
        """APIError 400 for a text that is certainly too long."""
        if n_characters > self.most_characters:
            raise too_long(f"{field}: {n_characters:,} characters are more than the context of {self.max_tokens:,} "
                           f"tokens: the largest prompt is {self.max_tokens - 1:,} tokens", field)

    def encode(self, text, add_special_tokens=True):
        """Token ids of a prompt's text. APIError 400 if it is very long or has characters that the tokenizer lacks."""
        self.check_length('prompt', len(text))
        try:
            return self.tokenizer.encode(text, add_special_tokens)
        except ValueError as e:
            raise invalid('prompt', f"prompt has {e}") from None

    @cached_property
    def shows_tools(self):
        """Does the chat template describe tools to the model?"""
        return shows_tools(self.tokenizer.chat_template)

    @cached_property
    def form_of_calls(self):
        """A `chat.tools.Form`, or None if that of the chat template is not known."""
        return form_of(self.tokenizer.chat_template.source)

    def conversation(self, body):
        """
        Token ids of the conversation in a `ChatBody` or `TokenizeBody`. APIError 404 if the model has no chat template,
        400 if the template does not take this conversation, or if it is very long.
        """
        if self.tokenizer.chat_template is None:
            raise APIError(404, "this model has no chat, because its tokenizer has no chat template: write the "
                                "conversation as a prompt, and POST it to /v1/completions")
        messages = [message.plain() for message in body.messages]
        has_calls = any(message['role'] == 'tool' or 'tool_calls' in message for message in messages)
        if (body.tools or has_calls) and not self.shows_tools:
            raise invalid('tools' if body.tools else 'messages', "tools are not in this model's chat template: "
                          "describe them in a message, or start serve.py with --chat_template=, a file with another")
        self.check_length('messages', sum(len(message.content) for message in body.messages))
        try:
            variables = body.variables
        except ValueError as e:  # it begins with the name of the field
            raise invalid(str(e).split()[0], str(e)) from None
        try:
            return self.tokenizer.conversation(messages, **variables)
        except RecursionError:
            raise invalid('documents', "documents, tools or chat_template_kwargs are nested too deeply") from None
        except ValueError as e:
            raise invalid('messages', str(e)) from None


def too_long(message, param='prompt'):
    """The APIError for what is longer than the model's context or the pool of blocks."""
    return APIError(400, message, param, 'context_length_exceeded')


def n_new_tokens(body, served, n_prompt):
    """
    How many tokens a sample of a prompt of n_prompt tokens may have: as many as the body asks for, or else 16, in a
    conversation as many as there is room for. APIError 400 if the context is too short for them.
    """
    is_chat = isinstance(body, ChatBody)
    asked, room = body.max_completion_tokens if is_chat else None, served.max_tokens - n_prompt
    asked = body.max_tokens if asked is None else asked
    if room < (asked != 0):
        raise too_long(f"the prompt has {n_prompt:,} tokens, and the context is {served.max_tokens:,} tokens: the "
                       f"largest prompt is {served.max_tokens - (asked != 0):,} tokens",
                       'messages' if is_chat else 'prompt')
    if asked is None:
        most = MOST_ENTRIES // max(1, entries_per_token(body) * body.n) - n_prompt
        return min(room, max(1, most)) if is_chat else min(room, 16)
    if asked > room:
        raise too_long(f"the prompt has {n_prompt:,} tokens and max_tokens is {asked:,}: together "
                       f"{n_prompt + asked:,}, but the context is {served.max_tokens:,} tokens: the largest "
                       f"max_tokens here is {room:,}", 'max_tokens')
    return asked


def entries_per_token(body):
    """How many token ids and log probabilities an answer has for each token of a sample."""
    return body.return_token_ids + (0 if body.n_logprobs is None else body.n_logprobs + 1)


def check_entries(body, requests):
    """APIError 400 for an answer that would be very large."""
    entries = entries_per_token(body)
    of_prompt = entries + 1 if getattr(body, 'echo', False) else int(body.return_token_ids)
    n = body.n * sum(len(request.prompt) * of_prompt + request.max_tokens * entries for request in requests)
    if n > MOST_ENTRIES:
        raise invalid('n', f"n times the tokens of all prompts and samples, with their log probabilities, is {n:,}, "
                           f"and an answer may have {MOST_ENTRIES:,}: ask for fewer samples, tokens or logprobs")


def forms_of(body, served):
    """
    The `forms` of a `ChatBody`: a grammar where its answer must call a tool, or may do so instead of JSON. APIError 400
    where there is no such tool, or the form of calls is not known.
    """
    forms, form, must_call = body.forms, body.tools and served.form_of_calls, body.tool_choice not in ('none', 'auto')
    if must_call:
        missing = {*body.callable_names} - {tool['function']['name'] for tool in body.tools}
        if missing or not body.tools:
            raise invalid('tool_choice', f"tool_choice needs {''.join(missing)[:64] or 'a tool'} among the tools")
        if form is None:
            raise invalid('tool_choice', "tool_choice: the chat template does not show how the model writes calls: "
                                         "leave it out, and read the answer as text")
    answer = None
    if not must_call:
        kind, text = [*forms.values(), ('', '')][0]
        if not form or kind not in ('json_schema', 'json_object'):
            return forms
        try:
            answer = orjson.loads(text or '{"type": "object"}')
        except ValueError:
            answer = None
        if type(answer) is not dict:
            return forms  # for which the error is
    tools = [tool for tool in body.tools if tool['function']['name'] in body.callable_names]
    return {'tools': ('grammar', grammar(form, tools, body.parallel_tool_calls, json_rule, answer))}


def requests_of(body, served, id, delivers):
    """
    A `Request` for each prompt of a `CompletionBody`, or the one of a `ChatBody`. APIError where a value does not fit
    the model.

    delivers: the `deliver` of each. A body without a seed gets one for each prompt, drawn here.
    """
    if body.stream_options.include_usage and not body.stream:
        raise invalid('stream_options', "stream_options is for streams: add stream, or leave it out")
    is_chat, strip = isinstance(body, ChatBody), False
    if is_chat:
        if body.top_logprobs and not body.logprobs:
            raise invalid('top_logprobs', "top_logprobs needs logprobs: add it, or leave both out")
        prompts, strip = [served.conversation(body)], served.tokenizer.strips and not body.continue_final_message
    else:
        prompts = [served.encode(prompt, body.add_special_tokens) if type(prompt) is str else prompt
                   for prompt in body.prompt]
    constraint = served.constraint(forms_of(body, served) if is_chat else body.forms)
    seeds = [secrets.randbelow(2**63 - MOST_SAMPLES) if body.seed is None else body.seed for _ in prompts]
    shared = dict(
        n=body.n, draw={name: getattr(body, name) for name in (*NAMES, 'min_tokens', 'logit_bias')},
        stop=tuple(body.stop), stop_token_ids=body.stop_token_ids, ignore_eos=body.ignore_eos, logprobs=body.n_logprobs,
        prompt_logprobs=not is_chat and body.echo and body.logprobs is not None, cache_salt=body.cache_salt,
        include_stop=body.include_stop_str_in_output, constraint=constraint, strip=strip and constraint is None,
        skip_special=body.skip_special_tokens and not (is_chat and body.tools))  # special tokens may mark a call
    try:
        requests = [Request(f'{id}-{i}', prompt, n_new_tokens(body, served, len(prompt)), seed, deliver=deliver,
                            **shared) for i, (prompt, seed, deliver) in enumerate(zip(prompts, seeds, delivers))]
        for request in requests:
            request.check_tokens(len(served.token_bytes))
    except ValueError as e:  # it begins with the name of the field
        raise invalid(str(e).split()[0], str(e)) from None
    check_entries(body, requests)
    return requests
