"""
The bodies of requests. The fields are those of OpenAI's legacy completions and chat completions
(https://platform.openai.com/docs/api-reference), with those that vLLM adds.
"""
import re
from contextlib import suppress
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

from chat.tools import DECODER, MOST_CALLS
from serving.api import MOST_MESSAGES, invalid, shown, without_nulls

MOST_LOGPROBS = 20  # tokens besides the drawn one
MOST_BIASES = 2**16  # of a request
MOST_PROMPTS, MOST_SAMPLES, MOST_STOPS, MOST_CHOICES, MOST_TOOLS = 128, 128, 256, 4096, 128  # of one body
MOST_STOP_CHARACTERS = 2**15  # of all stop strings of a body
MOST_NAME = 256     # characters of a tool's
NO_PARAMETERS = {'type': 'object', 'properties': {}}
ANY_OBJECT = '{"type": "object"}'  # as a schema


def of_an_object(schema):
    """A schema. ValueError if it is one of anything else than an object."""
    kind = schema.get('type', 'object')
    if 'object' not in (kind if type(kind) is list else [kind]):
        raise ValueError("should be the schema of an object, whose properties are the arguments, and its type is "
                         f"{shown(kind)}")
    return schema


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
    """The legacy field logprobs as a number: true is 1, as in vLLM, and false is None, for no log probabilities."""
    return {True: 1, False: None}[logprobs] if type(logprobs) is bool else logprobs


def whole(number):
    """A float without a fraction as an int: some clients write 5.0."""
    return int(number) if type(number) is float and number.is_integer() and abs(number) < 2**63 else number


def checked_biases(biases):
    """{token id: bias}. ValueError for the first one that is wrong: pydantic would collect all of them."""
    if type(biases) is dict:
        biases = {token: bias for token, bias in biases.items() if bias is not None}
        for token, bias in biases.items():
            is_id = re.fullmatch('[0-9]{1,19}', str(token)[:20])
            if not is_id or type(bias) not in (int, float) or not -100 <= bias <= 100:
                raise ValueError("logit_bias should have token ids as names and numbers from -100 to 100 as values, "
                                 f"but {str(token)[:20]!r} is not so")
        return {int(token): bias for token, bias in biases.items()}
    return biases


def text_of_schema(schema):
    """A JSON schema, an object or its text, as text."""
    try:
        schema = orjson.loads(schema) if type(schema) is str else schema
        if type(schema) is dict:
            return orjson.dumps(schema).decode()
    except orjson.JSONDecodeError as e:
        raise ValueError(f"the schema cannot be read, it must be JSON: {e}") from None
    except TypeError:
        raise ValueError("the schema is nested too deeply to be written: send one with fewer levels") from None
    raise ValueError(f"the schema must be a JSON object, as {{'type': 'object'}}, not {schema!r:.40}")


Whole = Annotated[int, BeforeValidator(whole)]
Tokens = Annotated[Whole, Field(ge=0, lt=2**31)]
TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Strict(BaseModel):
    """An object that has these fields and no others, each of the type it says. One that is null is left out."""
    model_config = ConfigDict(extra='forbid', strict=True, allow_inf_nan=False)

    @model_validator(mode='before')
    @classmethod
    def of_json(cls, fields):
        return without_nulls(fields) if type(fields) is dict else fields


class Lenient(Strict):
    """An object that may have other fields too, which are ignored."""
    model_config = ConfigDict(extra='ignore')


TokenIds = list_of(TokenId, min_length=1)
Prompts = Annotated[
    str | TokenIds | list_of(str, min_length=1, max_length=MOST_PROMPTS)
    | list_of(TokenIds, min_length=1, max_length=MOST_PROMPTS), AfterValidator(listed),
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

    @model_validator(mode='before')
    @classmethod
    def of_llama_server(cls, came):
        """llama-server has the schema beside the type, and the type may be json_object."""
        given = without_nulls(came) if type(came) is dict else {}
        if given.keys() == {'type', 'schema'} and given['type'] in ('json_object', 'json_schema'):
            return {'type': 'json_schema', 'json_schema': {'schema': given['schema']}}
        return came

    @model_validator(mode='after')
    def with_schema(self):
        if self.type == 'json_schema' and self.json_schema is None:
            raise ValueError("response_format has the type json_schema, and its field json_schema is missing: add it")
        if self.type != 'json_schema' and self.json_schema is not None:
            raise ValueError(f"the type {self.type} takes no schema: set the type to json_schema, or leave the field "
                             "json_schema out")
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
    min_tokens: Tokens = 0
    logit_bias: Annotated[dict[TokenId, Bias], BeforeValidator(checked_biases)] = Field(default_factory=dict,
                                                                                        max_length=MOST_BIASES)
    stop_token_ids: list_of(TokenId, max_length=128) = Field(default_factory=list)
    ignore_eos: bool = False
    n: Whole = Field(1, ge=1, le=MOST_SAMPLES, description="samples of each prompt")
    seed: Annotated[Annotated[Whole, Field(ge=-2**63, lt=2**63)] | None, says(
        "seed should be a whole number from -2**63 to 2**63 - 1")] = Field(
            None, description="sample i of a prompt draws with seed + i")
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
        found = {'response_format.type': ('json_schema', ANY_OBJECT if r.type == 'json_object' else None),
                 'response_format.json_schema.schema': ('json_schema', r.json_schema and r.json_schema.schema_),
                 'structured_outputs.json_object': ('json_schema', ANY_OBJECT if s.json_object else None),
                 'structured_outputs.json': ('json_schema', s.json_), 'structured_outputs.regex': ('regex', s.regex),
                 'structured_outputs.choice': ('choice', s.choice and tuple(s.choice)),
                 'structured_outputs.grammar': ('grammar', s.grammar)}
        return {field: form for field, form in found.items() if form[1] is not None}


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""
    prompt: Prompts
    max_tokens: Tokens | None = Field(None, description="by default 16, or what there is room for")
    n_logprobs: Annotated[Whole | None, BeforeValidator(number_of_likeliest)] = Field(
        None, alias='logprobs', ge=0, le=MOST_LOGPROBS)
    echo: bool = Field(False, description="with logprobs, the prompt has them too; max_tokens may then be 0")
    add_special_tokens: bool = Field(True, description="a BOS token before each text, if the tokenizer adds one")


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
    """
    The arguments of a call, a dict: templates take them so, and the API has them as JSON in a text. Anything else that
    a model has written there becomes {}, as in vLLM: the conversation goes on with the error of the tool.
    """
    with suppress(ValueError, RecursionError):
        arguments = DECODER.decode(arguments) if type(arguments) is str else arguments
        arguments = DECODER.decode(arguments) if type(arguments) is str else arguments  # some clients write it twice
    return arguments if type(arguments) is dict else {}


def thoughts_of(given):
    """The thoughts of an answer, a text or a list of parts that have one. Anything else is none."""
    parts = given if type(given) is list else [{'text': given}]
    texts = [part.get('text') for part in parts if type(part) is dict]
    return '\n'.join(text for text in texts if type(text) is str)


class CalledFunction(Lenient):
    name: str
    arguments: Annotated[dict, BeforeValidator(read_arguments)] = Field(default_factory=dict)


class ToolCall(Lenient):
    """A call in a message of the assistant, as the API gave it."""
    id: str = ''
    type: Literal['function'] = 'function'
    function: CalledFunction


class Message(Lenient):
    """
    A message of a conversation. What a client adds to it is ignored (refusal and annotations, for example), so the
    message of an answer can be sent back as it is. One of a tool answers the call with its id.
    """
    role: Literal['system', 'developer', 'user', 'assistant', 'tool']
    content: Annotated[str | list_of(Part), WrapValidator(text_of)]
    tool_calls: list_of(ToolCall, max_length=MOST_CALLS) = Field(default_factory=list)
    reasoning_content: Annotated[str, BeforeValidator(thoughts_of)] = Field(
        '', validation_alias=AliasChoices('reasoning_content', 'reasoning'))
    tool_call_id: str = ''
    name: str = ''

    @model_validator(mode='before')
    @classmethod
    def of_a_client(cls, message):
        if type(message) is not dict:
            return message
        if message.get('role') == 'function' or message.get('function_call'):
            raise ValueError("functions are tools here: send tool_calls, and their results with the role tool")
        if message.get('role') in ('assistant', 'tool') and message.get('content') is None:  # it calls, or says nothing
            return message | {'content': ''}
        return message

    def plain(self):
        """The message as templates know it."""
        plain = {'role': 'system' if self.role == 'developer' else self.role}
        if self.content or not self.tool_calls:
            plain['content'] = self.content
        if self.tool_calls:
            plain['tool_calls'] = [call.model_dump() for call in self.tool_calls]
        if self.reasoning_content:
            plain['reasoning_content'] = self.reasoning_content
        if self.role == 'tool':
            plain |= {name: text for name in ('tool_call_id', 'name') if (text := getattr(self, name))}
        return plain


class Function(Lenient):
    name: str = Field(min_length=1, max_length=MOST_NAME)
    description: str | None = None
    parameters: Annotated[dict, AfterValidator(of_an_object)] | None = Field(
        None, description="a JSON schema of its arguments, which are an object")


class ToolFields(Lenient):
    """A tool."""
    type: Literal['function']
    function: Function


def as_it_came(tool, validate):
    """
    A pydantic validator that checks a tool and returns it as it came, so that the template gets all that the client
    wrote. A tool without parameters gets NO_PARAMETERS, because many templates read them.
    """
    validate(tool)
    function = tool['function']
    return tool | {'function': function | {'parameters': function.get('parameters') or NO_PARAMETERS}}


Tool = Annotated[ToolFields, WrapValidator(as_it_came)]
ToolChoice = Annotated[Literal['none', 'auto', 'required'] | ToolFields, says(
    'tool_choice should be none, auto, required, or an object with the type function and the name of a tool')]


class Reasoning(Lenient):
    """How OpenAI's responses, and OpenRouter, say reasoning_effort and enable_thinking."""
    effort: str | None = Field(None, max_length=MOST_NAME)
    enabled: bool | None = None


class Thinking(Lenient):
    """How clients of Anthropic, DeepSeek and GLM say enable_thinking."""
    type: Literal['enabled', 'disabled', 'adaptive']


def thinking_of(given):
    """`thinking` as an object: true has the type enabled, false disabled. None if an object has no type."""
    if type(given) is bool:
        return {'type': 'enabled' if given else 'disabled'}
    return None if type(given) is dict and given.get('type') is None else given


class ConversationFields(Strict):
    """How a conversation becomes the text of a prompt."""
    add_generation_prompt: bool | None = Field(None, description="end the prompt where an answer begins; by default "
                                                                 "true, unless a message is continued")
    continue_final_message: bool = Field(False, description="go on with the last message, of the assistant")
    chat_template_kwargs: dict = Field(default_factory=dict, description="more variables of the chat template, "
                                                                         "documents for example")
    reasoning_effort: str | None = Field(None, max_length=MOST_NAME, description="low for example: the template gets "
                                         "it, with enable_thinking; none is enable_thinking: false")
    reasoning: Reasoning = Field(default_factory=Reasoning, description="effort and enabled, of the fields beside it")
    enable_thinking: bool | None = Field(None, description="given to the template")
    thinking: Annotated[Thinking | None, BeforeValidator(thinking_of)] = Field(
        None, description="enable_thinking, as type: enabled or disabled")
    tools: list_of(Tool, max_length=MOST_TOOLS) = Field(default_factory=list, description="that an answer may call")

    @property
    def variables(self):
        """What the template is given beside the messages. APIError for what does not go together."""
        if self.continue_final_message and (self.add_generation_prompt or self.messages[-1].role != 'assistant'):
            raise invalid('continue_final_message', "continue_final_message goes on with the assistant's last message: "
                          "end messages with one, and leave add_generation_prompt out")
        if reserved := {'self', 'messages', 'tools', 'continue_final_message'} & self.chat_template_kwargs.keys():
            raise invalid('chat_template_kwargs', f"chat_template_kwargs has {', '.join(sorted(reserved))}: leave it "
                          "out, or make it a field of the body")
        fields = {name: value for name in ('continue_final_message', 'add_generation_prompt', 'tools')
                  if (value := getattr(self, name)) not in (None, [])}
        return self.thinking_variables | self.chat_template_kwargs | fields

    @property
    def effort(self):
        """The effort of reasoning, from the one of its two fields that is given, or None."""
        return self.reasoning_effort or self.reasoning.effort or None

    @property
    def thinking_variables(self):
        """The template's variables for thinking, from any field. A template that reads none writes the same prompt."""
        efforts = {'reasoning_effort': self.effort} if self.effort not in (None, 'none') else {}
        switches = [self.effort and self.effort != 'none', self.thinking and self.thinking.type != 'disabled',
                    self.reasoning.enabled, self.enable_thinking]
        given = [switch for switch in switches if switch is not None]
        return efforts | ({'enable_thinking': given[-1]} if given else {})


class ChatBody(GenerationBody, ConversationFields):
    """The body of POST /v1/chat/completions."""
    messages: list_of(Message, min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: Tokens | None = Field(None, description="by default as many as there is room for")
    max_tokens: Tokens | None = Field(None, description="the older name of max_completion_tokens")
    logprobs: bool = False
    top_logprobs: Whole = Field(0, ge=0, le=MOST_LOGPROBS, description="with logprobs")
    tool_choice: ToolChoice = Field('auto', description="none leaves the tools out")
    reasoning_format: str = Field('', max_length=MOST_NAME, description="none, or raw, leaves thoughts in the content; "
                                  "hidden leaves them out, as include_reasoning: false")
    include_reasoning: bool = True
    parallel_tool_calls: bool = Field(True, description="may an answer have several calls?")
    add_special_tokens: Literal[False] = Field(False, description="the template writes them")

    @property
    def most_tokens(self):
        """The most tokens of an answer, from the one of its two fields that is given."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def n_logprobs(self):
        return self.top_logprobs if self.logprobs else None

    @property
    def may_call_several(self):
        """A tool that is named is called once, as in OpenAI's API and vLLM."""
        return self.parallel_tool_calls and type(self.tool_choice) is str

    @property
    def callable_names(self):
        """The names of the tools that an answer may call."""
        names = [tool['function']['name'] for tool in self.tools]
        return names if type(self.tool_choice) is str else [self.tool_choice.function.name]


class TokenizeBody(Body, ConversationFields):
    """The body of POST /tokenize: a prompt, or messages."""
    prompt: str | None = None
    messages: list_of(Message, min_length=1, max_length=MOST_MESSAGES) | None = None
    add_special_tokens: bool = Field(True, description="of a prompt")
    return_token_strs: bool = Field(False, description="add token_strs, the text of each token")


class DetokenizeBody(Body):
    """The body of POST /detokenize."""
    tokens: list_of(TokenId)
