"""The description of the API for GET /openapi.json (OpenAPI 3.1), from the same objects that check the bodies."""
from pydantic.json_schema import models_json_schema

from serving.api import CompletionBody, DetokenizeBody, TokenizeBody


def object_of(**properties):
    """The schema of an object that has all of these properties."""
    return {'type': 'object', 'properties': properties, 'required': list(properties)}


def either(schema):
    return {'anyOf': [schema, NULL]}


def list_of(schema):
    return {'type': 'array', 'items': schema}


TEXT, NUMBER, COUNT, NULL = {'type': 'string'}, {'type': 'number'}, {'type': 'integer', 'minimum': 0}, {'type': 'null'}
OBJECT = {'type': 'object'}
LOGPROBS = object_of(tokens=list_of(TEXT), token_logprobs=list_of(either(NUMBER)), text_offset=list_of(COUNT),
                     top_logprobs=list_of(either({'type': 'object', 'additionalProperties': NUMBER})))
USAGE = object_of(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT,
                  prompt_tokens_details=object_of(cached_tokens=COUNT))
CHOICE = object_of(index=COUNT, text=TEXT, logprobs=either(LOGPROBS),
                   finish_reason={'enum': ['stop', 'length', None]})
SCHEMAS = {
    'Error': object_of(error=object_of(message=TEXT, type=TEXT, param=either(TEXT), code=either(TEXT))),
    'Completion': object_of(id=TEXT, object={'const': 'text_completion'}, created=COUNT, model=TEXT,
                            choices=list_of(CHOICE), usage=USAGE),
    'Models': object_of(object={'const': 'list'}, data=list_of(object_of(
        id=TEXT, object={'const': 'model'}, created=COUNT, owned_by=TEXT, max_model_len=COUNT))),
    'Tokens': object_of(tokens=list_of(COUNT), count=COUNT, max_model_len=COUNT),
    'Text': object_of(prompt=TEXT),
    'Cache': OBJECT,
    'Health': object_of(status={'const': 'ok'}),
}
REASONS = {400: "a field is wrong: param names it", 401: "the API key is missing or wrong", 404: "another model",
           413: "the body is too large", 429: "the queue is full: see Retry-After", 500: "a bug, or the engine failed",
           503: "the server is loading its model, or stopping"}
PATHS = [  # method, path, what it does, body, what it answers (a schema or a content type), errors, needs the key?
    ('post', '/v1/completions', "Continue prompts", CompletionBody, 'Completion', (400, 404, 413, 429, 500, 503), True),
    ('get', '/v1/models', "The model that is served", None, 'Models', (503,), True),
    ('post', '/tokenize', "The tokens of a text", TokenizeBody, 'Tokens', (400, 404, 413, 503), True),
    ('post', '/detokenize', "The text of tokens", DetokenizeBody, 'Text', (400, 404, 413, 503), True),
    ('get', '/cache', "The pool of blocks and the requests, as the page shows them", None, 'Cache', (503,), True),
    ('get', '/health', "Does the server take requests?", None, 'Health', (503,), False),
    ('get', '/metrics', "Counters and histograms for Prometheus", None, 'text/plain', (503,), False),
    ('get', '/', "The page", None, 'text/html', (), False),
    ('post', '/v1/chat/completions', "Refused: a base model has no chat template", None, None, (404,), False),
]


def reference(name):
    return {'$ref': f'#/components/schemas/{name}'}


def operation(summary, body, answer, errors, key, has_key):
    """One operation of the description."""
    responses = {str(status): {'description': REASONS[status],
                               'content': {'application/json': {'schema': reference('Error')}}}
                 for status in (*errors, *(401,) * (key and has_key))}
    if answer in SCHEMAS:
        content = {'application/json': {'schema': reference(answer)}}
        if answer == 'Completion':
            content['text/event-stream'] = {'schema': object_of(data=TEXT)}  # an event
        responses['200'] = {'description': "as asked", 'content': content}
    elif answer:
        responses['200'] = {'description': "as asked", 'content': {answer: {'schema': TEXT}}}
    described = {'summary': summary, 'responses': responses}
    if body:
        described['requestBody'] = {'required': True,
                                    'content': {'application/json': {'schema': reference(body.__name__)}}}
    if key and has_key:
        described['security'] = [{'key': []}]
    return described


def openapi(has_key):
    """The description, a dict. has_key: do requests need an API key?"""
    bodies = [(body, 'validation') for body in (CompletionBody, TokenizeBody, DetokenizeBody)]
    schemas = models_json_schema(bodies, ref_template='#/components/schemas/{model}')[1]['$defs']
    paths = {}
    for method, path, summary, body, answer, errors, key in PATHS:
        paths.setdefault(path, {})[method] = operation(summary, body, answer, errors, key, has_key)
    components = {'schemas': schemas | SCHEMAS}
    if has_key:
        components['securitySchemes'] = {'key': {'type': 'http', 'scheme': 'bearer'}}
    return {'openapi': '3.1.0', 'info': {'title': "nanoGPT's completions", 'version': '1'}, 'paths': paths,
            'components': components}
