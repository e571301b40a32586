"""
POST /v1/responses (https://platform.openai.com/docs/api-reference/responses): its body becomes that of a chat, and the
answer of the chat becomes a response, or its events. Nothing is kept: each body has the whole conversation.
"""
import secrets
from typing import Annotated, Literal

import orjson
from pydantic import BeforeValidator, Field, model_validator

from chat.thoughts import Thought
from chat.tools import Call
from serving import bodies
from serving.answer import LARGE, ChatCompletion, event
from serving.api import MOST_MESSAGES, shown
from serving.bodies import ChatBody, Lenient, Message, ResponseFormat, Tokens, Tool, ToolChoice, Whole, list_of

KINDS = 'message', 'reasoning', 'function_call', 'function_call_output'  # of items in the input
OF_A_CHAT = {'response_format.json_schema': 'text.format', 'response_format': 'text.format',
             'max_tokens': 'max_output_tokens', 'messages': 'input'}  # {field of a chat: its name here}


def message_of(item):
    """The message of a chat that an item of the input is."""
    if type(item) is not dict:
        return item
    kind = item.get('type') or 'message'
    if kind == 'function_call':
        return {'role': 'assistant', 'tool_calls': [{'id': item.get('call_id', ''), 'function': item}]}
    if kind == 'reasoning':
        return {'role': 'assistant', 'reasoning_content': item.get('content')}
    if kind == 'function_call_output':
        return {'role': 'tool', 'tool_call_id': item.get('call_id', ''), 'content': item.get('output')}
    if kind == 'item_reference':  # of the AI SDK, unless it is told that nothing is stored
        raise ValueError("input has an item_reference, and this server keeps no answers: send the whole item (the AI "
                         "SDK does with providerOptions: {openai: {store: false}})")
    if kind != 'message':
        raise ValueError(f"input has an item of the type {str(kind)[:40]!r}: this server reads {', '.join(KINDS)}")
    return item


def messages_of(given):
    if type(given) not in (str, list):
        raise ValueError(f"input should be a text, or a list of items, not {shown(given)}")
    if type(given) is str:
        return [{'role': 'user', 'content': given}]
    # an item without content is left out: it has a summary only, or is encrypted for OpenAI's own models
    return [item for item in given if not (type(item) is dict and item.get('type') == 'reasoning'
                                           and not item.get('content'))]


def nested(name):
    """A pydantic validator that moves the fields beside a type into the field `name`, where a chat has them."""
    def of_chat(given):
        if type(given) is not dict or given.get('type') not in ('function', 'json_schema'):
            return given
        left_out = ('type', 'strict') if name == 'function' else ('type',)  # templates show all of a function
        fields = {key: value for key, value in given.items() if key not in left_out and value is not None}
        return {'type': given['type'], name: fields}
    return BeforeValidator(of_chat)


def flat(given):
    """The inverse of `nested`, of a dict."""
    return {'type': given['type']} | {key: value for part in given.values() if type(part) is dict
                                      for key, value in part.items()}


class TextFields(Lenient):
    format: Annotated[ResponseFormat | None, nested('json_schema')] = Field(
        None, description="as response_format of a chat, with what json_schema has there beside its type")


class ResponseBody(ChatBody):
    """The body of POST /v1/responses: that of a chat, some of whose fields have other names and forms."""
    messages: Annotated[
        list_of(Annotated[Message, BeforeValidator(message_of)], min_length=1, max_length=MOST_MESSAGES),
        BeforeValidator(messages_of)] = Field(
            alias='input', description=f"a text, or a list of items of the types {', '.join(KINDS)}")
    instructions: str = Field('', description="a system message before the input")
    max_tokens: Tokens | None = Field(None, alias='max_output_tokens')
    n: Whole = Field(1, ge=1, le=1)
    return_token_ids: Literal[False] = False
    metadata: dict[str, str] = Field(default_factory=dict, description="comes back with the response")
    tools: list_of(Annotated[Tool, nested('function')], max_length=bodies.MOST_TOOLS) = Field(default_factory=list)
    tool_choice: Annotated[ToolChoice, nested('function')] = 'auto'
    text: TextFields = Field(default_factory=TextFields)
    include: list_of(str, max_length=16) = Field(default_factory=list,
                                                 description="message.output_text.logprobs has an effect")

    @model_validator(mode='after')
    def as_a_chat(self):
        messages = [Message(role='system', content=self.instructions)] if self.instructions else []
        for message in self.messages:  # thoughts, a text and the calls after it are one message in a chat
            last = messages[-1] if messages else message
            follows = message.tool_calls or not (last.content or last.tool_calls)
            if follows and last is not message and last.role == message.role == 'assistant':
                fields = 'reasoning_content', 'content', 'tool_calls'
                messages[-1] = last.model_copy(update={
                    name: getattr(last, name) + getattr(message, name) for name in fields})
            else:
                messages.append(message)
        self.messages, self.response_format = messages, self.text.format or self.response_format
        self.logprobs |= self.top_logprobs > 0 or 'message.output_text.logprobs' in self.include
        return self


def renamed(error):
    """The APIError of a chat with the names that its fields have here."""
    for theirs, ours in OF_A_CHAT.items():
        if f'{error.param}.'.startswith(f'{theirs}.'):
            error.param, error.args = error.param.replace(theirs, ours), (str(error).replace(theirs, ours),)
    return error


class ModelResponse(ChatCompletion):
    """The answer to a `ResponseBody`."""

    def __init__(self, id, body, served, requests):
        super().__init__(id, body, served, requests)
        self.items = []  # of its output so far
        self.part = None  # the text, or the thoughts, in the last item, while more of it may come
        self.logprobs, self.n_left_out = [], 0  # of tokens whose text has not come yet; thoughts, so many, have none
        self.events, self.n_events = b'', 0  # that are not sent yet, as bytes; how many there were

    @property
    def is_large(self):
        """The last events have all log probabilities again."""
        n = 0 if self.body.n_logprobs is None else self.choices[0].n_tokens * (1 + self.body.n_logprobs)
        return super().is_large or self.done and n > LARGE

    def object(self):
        self.take()
        return self.state()

    def chunks(self):
        """The events of what has come since the last call, and at the end the last one."""
        if not self.n_events:
            self.note('created', response=self.state())
            self.note('in_progress', response=self.state())
        self.take()
        if self.done:
            state = self.state()
            self.note(state['status'], response=state)
        events, self.events = self.events, b''
        return events

    def note(self, kind, **fields):
        """Write an event of a stream; fields may change after it."""
        if not self.body.stream:
            return
        name = f'response.{kind}'
        self.events += event({'type': name, 'sequence_number': self.n_events, **fields}, name)
        self.n_events += 1

    def note_item(self, kind, **fields):
        """Write an event of the last item."""
        self.note(kind, item_id=self.items[-1]['id'], output_index=len(self.items) - 1, **fields)

    def take(self):
        """Take what has come since the last call: `items` grow, and their events are written."""
        choice, = self.choices
        pieces, reason = choice.pieces, choice.finish_reason
        self.logprobs += (choice.take()['logprobs'] or {}).get('content', [])
        del self.logprobs[:choice.n_thought - self.n_left_out]
        self.n_left_out = choice.n_thought
        if reason and all(isinstance(piece, Thought) for piece in pieces) and {
                item['type'] for item in self.items} <= {'reasoning'}:
            pieces.append('')  # an answer has a message or a call
        for piece in pieces:
            if isinstance(piece, Call):
                self.add_call(piece)
            else:
                self.add_text(piece)
        if reason or self.error:
            self.end_part('completed' if reason in ('stop', 'tool_calls') else 'incomplete')

    def add_text(self, piece):
        """More text or thoughts, in the last item, or in a new one."""
        is_thought = isinstance(piece, Thought)
        if self.part is None or is_thought != (self.part['type'] == 'reasoning_text'):
            self.end_part('completed')
            head = {'type': 'reasoning', 'id': f'rs_{secrets.token_hex(12)}', 'summary': []} if is_thought else {
                'type': 'message', 'id': f'msg_{secrets.token_hex(12)}', 'role': 'assistant'}
            self.begin(head | {'status': 'in_progress', 'content': []})
            self.part = {'type': 'reasoning_text', 'text': ''} if is_thought else {
                'type': 'output_text', 'text': '', 'annotations': [], 'logprobs': []}
            self.note_item('content_part.added', content_index=0, part=self.part)
            self.items[-1]['content'].append(self.part)
        text = piece.text if is_thought else piece
        self.part['text'] += text
        if text:
            self.note_item(f"{self.part['type']}.delta", content_index=0, delta=text, **self.taken_logprobs())

    def taken_logprobs(self):
        """The field logprobs of what has come of a text, if it is not of thoughts."""
        if 'logprobs' not in self.part:
            return {}
        logprobs, self.logprobs = self.logprobs, []
        self.part['logprobs'] += logprobs
        return {'logprobs': logprobs}

    def end_part(self, status):
        """The end of the text or the thoughts that came last, if there are any."""
        if self.part is not None:
            self.taken_logprobs()
            kind, fields = self.part['type'], {key: self.part[key] for key in ('text', 'logprobs') if key in self.part}
            self.note_item(f'{kind}.done', content_index=0, **fields)
            self.note_item('content_part.done', content_index=0, part=self.part)
            self.part = None
            self.end(status=status)

    def add_call(self, call):
        self.end_part('completed')
        self.begin({'type': 'function_call', 'id': f'fc_{secrets.token_hex(12)}', 'call_id': call.id,
                    'name': call.name, 'arguments': '', 'status': 'in_progress'})
        self.note_item('function_call_arguments.delta', delta=call.arguments)
        self.note_item('function_call_arguments.done', name=call.name, arguments=call.arguments)
        self.end(arguments=call.arguments, status='completed')

    def begin(self, item):
        self.items.append(item)
        self.note_item('output_item.added', item=item)

    def end(self, **fields):
        self.items[-1] |= fields
        self.note_item('output_item.done', item=self.items[-1])

    def state(self):
        body, reason = self.body, self.choices[0].finish_reason
        status = ('failed' if self.error else 'in_progress' if not self.done else 'incomplete' if reason == 'length'
                  else 'completed')
        usage = self.usage() if self.done else None
        format = flat((body.response_format or ResponseFormat(type='text')).model_dump(by_alias=True))
        if 'schema' in format:
            format['schema'] = orjson.loads(format['schema'])
        return {
            'id': self.id, 'object': 'response', 'created_at': self.head['created'], 'model': self.head['model'],
            'status': status, 'output': self.items, 'usage': usage,
            'error': {'code': 'invalid_prompt' if self.error.status == 400 else 'server_error',
                      'message': str(self.error)} if self.error else None,
            'incomplete_details': {'reason': 'max_output_tokens'} if status == 'incomplete' else None,
            'instructions': body.instructions or None, 'max_output_tokens': body.most_tokens,
            'temperature': body.temperature, 'top_p': body.top_p, 'top_logprobs': body.top_logprobs,
            'tools': [{'parameters': None, 'strict': None, **flat(tool)} for tool in body.tools],
            'tool_choice': body.tool_choice if type(body.tool_choice) is str else flat(
                body.tool_choice.model_dump(exclude_unset=True)),
            'parallel_tool_calls': body.parallel_tool_calls, 'text': {'format': format},
            'reasoning': {'effort': body.effort, 'summary': None},
            'background': False, 'previous_response_id': None, 'store': False, 'truncation': 'disabled',
            'metadata': body.metadata}

    def usage(self):
        counts = super().usage()
        return {'input_tokens': counts['prompt_tokens'], 'output_tokens': counts['completion_tokens'],
                'total_tokens': counts['total_tokens'],
                'input_tokens_details': {'cached_tokens': self.n_cached, 'cache_write_tokens': 0},
                'output_tokens_details': counts['completion_tokens_details']}
