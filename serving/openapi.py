"""The description of the API for GET /openapi.json (OpenAPI 3.1): addresses, and the bodies as they are checked."""
from collections.abc import Callable
from typing import NamedTuple

from pydantic.json_schema import models_json_schema

TEXT = {'type': 'string'}
ERROR = {'type': 'object', 'required': ['error'], 'properties': {'error': {
    'type': 'object', 'required': ['message', 'type', 'param', 'code'], 'properties': {
        'message': TEXT, 'type': TEXT, 'param': {'type': ['string', 'null']}, 'code': {'type': ['string', 'null']}}}}}


class Endpoint(NamedTuple):
    """What is answered at an address."""
    method: str
    path: str
    handler: Callable                 # of the `Service` and the body or the request; its docstring is the summary
    answer: str = 'application/json'  # its content type
    key: bool = True                  # does it need the API key, where there is one?
    body: type | None = None

    def operation(self, has_key):
        content = {self.answer: {}}
        if self.body and 'stream' in self.body.model_fields:
            content['text/event-stream'] = {}
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
    """The content of a body or an error whose schema has this name."""
    return {'application/json': {'schema': {'$ref': f'#/components/schemas/{name}'}}}


def openapi(endpoints, has_key):
    """The description of endpoints, a dict. has_key: do requests need an API key?"""
    bodies = [(endpoint.body, 'validation') for endpoint in endpoints if endpoint.body]
    schemas = models_json_schema(bodies, ref_template='#/components/schemas/{model}')[1]['$defs']
    return {'openapi': '3.1.0', 'info': {'title': "nanoGPT's completions", 'version': '1',
                                         'description': "Answers are those of OpenAI's API, with fields of vLLM."},
            'components': {'schemas': schemas | {'Error': ERROR},
                           'securitySchemes': {'key': {'type': 'http', 'scheme': 'bearer'}}},
            'paths': {endpoint.path: {endpoint.method.lower(): endpoint.operation(has_key)} for endpoint in endpoints}}
