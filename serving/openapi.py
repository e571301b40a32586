"""The description of the API for GET /openapi.json (OpenAPI 3.1), from the same objects that check the bodies."""
from collections.abc import Callable
from typing import NamedTuple

from pydantic.json_schema import models_json_schema


def object_of(**properties):
    """The schema of an object that has all of these properties."""
    return {'type': 'object', 'properties': properties, 'required': list(properties)}


def either(schema):
    return {'anyOf': [schema, NULL]}


def list_of(schema):
    return {'type': 'array', 'items': schema}


VERSION = '1'  # of the API
TEXT, NUMBER, COUNT, NULL = {'type': 'string'}, {'type': 'number'}, {'type': 'integer', 'minimum': 0}, {'type': 'null'}
LOGPROBS = object_of(tokens=list_of(TEXT), token_logprobs=list_of(either(NUMBER)), text_offset=list_of(COUNT),
                     top_logprobs=list_of(either({'type': 'object', 'additionalProperties': NUMBER})))
USAGE = object_of(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT,
                  prompt_tokens_details=object_of(cached_tokens=COUNT))
CHOICE = object_of(index=COUNT, text=TEXT, logprobs=either(LOGPROBS),
                   finish_reason={'enum': ['stop', 'length', None]})
SCORE = dict(token=TEXT, logprob=NUMBER, bytes=list_of(COUNT))
SCORED = object_of(**SCORE, top_logprobs=list_of(object_of(**SCORE)))
CALL = object_of(id=TEXT, type={'const': 'function'}, function=object_of(name=TEXT, arguments=TEXT))
MESSAGE = object_of(role={'const': 'assistant'}, content=either(TEXT), refusal=NULL)
MESSAGE['properties']['tool_calls'] = list_of(CALL)
CHAT_CHOICE = object_of(index=COUNT, message=MESSAGE, finish_reason={'enum': ['stop', 'length', 'tool_calls', None]},
                        logprobs=either(object_of(refusal=NULL, content=list_of(SCORED))))
PART = object_of(type={'const': 'output_text'}, text=TEXT, annotations=list_of({}), logprobs=list_of(SCORED))
STATUS = {'enum': ['in_progress', 'completed', 'incomplete', 'failed']}
ITEMS = [object_of(type={'const': 'message'}, id=TEXT, status=STATUS, content=list_of(PART)), object_of(
    type={'const': 'function_call'}, id=TEXT, call_id=TEXT, name=TEXT, arguments=TEXT, status=STATUS)]
SCHEMAS = {
    'Error': object_of(error=object_of(message=TEXT, type=TEXT, param=either(TEXT), code=either(TEXT))),
    'Completion': object_of(id=TEXT, object={'const': 'text_completion'}, created=COUNT, model=TEXT,
                            choices=list_of(CHOICE), usage=USAGE),
    'ChatCompletion': object_of(id=TEXT, object={'const': 'chat.completion'}, created=COUNT, model=TEXT,
                                choices=list_of(CHAT_CHOICE), usage=USAGE),
    'Response': object_of(id=TEXT, object={'const': 'response'}, created_at=COUNT, model=TEXT, status=STATUS,
                          output=list_of({'anyOf': ITEMS}), usage=object_of(
                              input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT)),
    'Model': object_of(id=TEXT, object={'const': 'model'}, created=COUNT, owned_by=TEXT, max_model_len=COUNT,
                       chat={'type': 'boolean'}, sampling_defaults={'type': 'object', 'additionalProperties': NUMBER}),
    'Models': object_of(object={'const': 'list'}, data=list_of({'$ref': '#/components/schemas/Model'})),
    'Tokens': object_of(tokens=list_of(COUNT), count=COUNT, max_model_len=COUNT, token_strs=either(list_of(TEXT))),
    'Text': object_of(prompt=TEXT),
    'Health': object_of(status={'const': 'ok'}),
    'Object': {'type': 'object'},
}


class Endpoint(NamedTuple):
    """
    What is answered at an address. handler: called with the `Service` and, if there is one, the body; its docstring is
    the summary. answer: the name of one of SCHEMAS, or a content type. key: does it need the API key, where there is
    one?
    """
    method: str
    path: str
    handler: Callable
    answer: str
    key: bool = True
    body: type | None = None

    def operation(self, has_key):
        """One operation of the description."""
        answer = self.answer
        content = json_of(answer) if answer in SCHEMAS else {answer: {'schema': TEXT}}
        if answer in ('Completion', 'ChatCompletion', 'Response'):
            content['text/event-stream'] = {'schema': object_of(data=TEXT)}  # an event
        described = {'summary': self.handler.__doc__,
                     'responses': {'200': {'description': "as asked", 'content': content},
                                   'default': {'description': "why not", 'content': json_of('Error')}}}
        if '{id}' in self.path:
            described['parameters'] = [{'name': 'id', 'in': 'path', 'required': True, 'schema': TEXT}]
        if self.body:
            described['requestBody'] = {'required': True, 'content': json_of(self.body.__name__)}
        if self.key and has_key:
            described['security'] = [{'key': []}]
        return described


def json_of(name):
    """The content of a body or an answer whose schema has this name."""
    return {'application/json': {'schema': {'$ref': f'#/components/schemas/{name}'}}}


def openapi(endpoints, has_key):
    """The description of endpoints, a dict. has_key: do requests need an API key?"""
    bodies = [(endpoint.body, 'validation') for endpoint in endpoints if endpoint.body]
    schemas = models_json_schema(bodies, ref_template='#/components/schemas/{model}')[1]['$defs']
    return {'openapi': '3.1.0', 'info': {'title': "nanoGPT's completions", 'version': VERSION},
            'components': {'schemas': schemas | SCHEMAS,
                           'securitySchemes': {'key': {'type': 'http', 'scheme': 'bearer'}}},
            'paths': {endpoint.path: {endpoint.method.lower(): endpoint.operation(has_key)} for endpoint in endpoints}}
