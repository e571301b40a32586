"""
What the API takes and refuses: the fields of a body that ask for nothing, or for what is not here, and errors. The
bodies are in bodies.py.
"""
import difflib
import re
from codecs import BOM_UTF8

import orjson
from pydantic import ValidationError

MOST_FIELDS = 256     # of an object in a body, known or not
MOST_MESSAGES = 2048  # of one body
TYPES = {401: 'authentication_error', 403: 'permission_error', 429: 'rate_limit_error', 500: 'server_error',
         503: 'service_unavailable'}
TOOLS = "this is for conversations: POST messages to /v1/chat/completions"
FORM = "response_format or structured_outputs says what form a text has: {\"grammar\": \"...\"} for example"
KEPT = "this server keeps no answers: send the whole conversation as input"
LENGTHS = 'max_output_tokens', 'max_tokens'  # an address that generates takes one of these names
SWITCHES = 'think', 'thinking_budget', 'reasoning_budget'  # of thinking, in other servers
UNSUPPORTED = {  # {field that this server lacks: advice}; if a body has several, the error names the first one below
    'tools': TOOLS, 'functions': "its name is tools here", 'json_schema': FORM, 'grammar': FORM, 'guided_json': FORM,
    'guided_regex': FORM, 'guided_choice': FORM, 'guided_grammar': FORM, 'guided_decoding_backend': FORM,
    'messages': "POST them to /v1/chat/completions",
    'prompt': "POST a text to continue to /v1/completions; prompts are not stored here",
    'content': "its name is prompt here",
    'input': "POST it to /v1/responses",
    'previous_response_id': KEPT, 'conversation': KEPT, 'background': "this server keeps no answers: stream this one",
    'modalities': "this model reads and writes text only",
    'audio': "this model reads and writes text only",
    'web_search_options': "this server searches nothing: write what is known in a message",
    'suffix': "this model continues a text, and cannot fill in the middle of one",
    'best_of': "ask for n samples, with logprobs to compare them, and choose one",
    'use_beam_search': "this server draws samples: ask for n of them, with logprobs to compare them",
    'store': "this server keeps no answers",
    **dict.fromkeys(SWITCHES, "give enable_thinking, true or false, instead"),
    'documents': "if the chat template reads them, give it that: chat_template_kwargs, {\"documents\": [...]}",
    'chat_template': "the template of the model's own files is used",
    'prompt_logprobs': "echo with logprobs gives those of a prompt",
    'repeat_penalty': "its name is repetition_penalty here",
    **dict.fromkeys(['n_predict', 'max_new_tokens', 'max_completion_tokens', *LENGTHS], "its name is {length} here"),
    'tool_choice': TOOLS, 'function_call': "its name is tool_choice here",
}
IGNORED = {  # they change no token
    'user', 'metadata', 'verbosity', 'parallel_tool_calls', 'prompt_cache_key', 'prompt_cache_retention', 'usage',
    'prompt_cache_options', 'safety_identifier', 'include', 'max_tool_calls', 'spaces_between_special_tokens',
    'cache_prompt', 'prediction', 'include_reasoning', 'timings_per_token', 'repeat_last_n', 'mirostat_tau',
    'mirostat_eta', 'xtc_threshold', 'dynatemp_exponent', 'service_tier', 'truncation', 'request_id',
    'dry_base', 'dry_allowed_length', 'dry_penalty_last_n', 'dry_sequence_breakers', 'adaptive_decay',
    'reasoning_format'}
THINKING = {  # also ignored in a body without a conversation
    'reasoning_effort', 'reasoning', 'enable_thinking', 'thinking', *SWITCHES}
NOTHING = {  # the values with which a field asks for nothing, besides 0, false and empty ones
    'response_format': {'type': 'text'}, 'modalities': ['text'],
    'seed': -1, 'max_tokens': -1, 'max_completion_tokens': -1, 'length_penalty': 1,
    'repeat_penalty': 1, 'typical_p': 1, 'typical': 1, 'tfs_z': 1, 'id_slot': -1, 'n_predict': -1,
    'top_n_sigma': -1, 'typ_p': 1, 'adaptive_target': -1, 't_max_predict_ms': -1, 'detokenize': True,
    'truncate_prompt_tokens': -1, 'logit_bias': [],
}
ASK_NOTHING_WHEN_EMPTY = {'reasoning_effort', 'reasoning'}  # though a conversation has these fields
ASK_WHEN_EMPTY = {'web_search_options', 'prompt_logprobs', 'n_predict', 'max_new_tokens', 'guided_json', 'json_schema',
                  *SWITCHES}


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


def parsed(kind, data, defaults=None):
    """
    The bytes of a request as a body of this kind. A field that is null or asks for nothing is left out. `defaults` has
    sampling fields, which take the place of fields that are left out. APIError 400 names the first field that is wrong.
    """
    if not data.strip():
        raise APIError(400, "the body is empty, but should be a JSON object", code='invalid_json')
    try:
        fields = orjson.loads(data.removeprefix(BOM_UTF8))
    except orjson.JSONDecodeError as e:
        raise APIError(400, f"the body should be a JSON object in UTF-8: {e}", code='invalid_json') from None
    if type(fields) is not dict:
        raise APIError(400, f"the body should be a JSON object, not {data[:20].decode('utf-8', 'replace')!r}")
    known = {field.alias or name for name, field in kind.model_fields.items()}
    try:
        fields = asked_for(without_nulls(fields), known)
        if unknown := [name for name in fields if name not in known]:
            raise unknown_field(next((name for name in UNSUPPORTED if name in unknown), unknown[0]), known)
        return kind.model_validate({name: v for name, v in (defaults or {}).items() if name in known} | fields)
    except ValidationError as e:
        raise named(e.errors(include_url=False)[0]) from None
    except (ValueError, RecursionError) as e:  # many fields, or lists in lists
        raise APIError(400, f"the body cannot be read: {e}", code='invalid_json') from None


def without_nulls(fields):
    """An object of JSON without the fields that are null. ValueError if it has more than MOST_FIELDS."""
    if len(fields) > MOST_FIELDS:
        raise ValueError(f"an object of the body has {len(fields):,} fields, and at most {MOST_FIELDS} are allowed: "
                         "send those that the server knows")
    return {name: value for name, value in fields.items() if value is not None}


def asked_for(fields, known):
    """The fields of a body that ask for something. known: the fields that there are."""
    functions, choices = {'tools', 'functions'}, [fields.get('tool_choice'), fields.get('function_call')]
    left_out = IGNORED - known | {name for name, value in fields.items() if name in NOTHING and value == NOTHING[name]}
    # an empty field with a name like a known one stays, and is refused: the name may be misspelled
    empty = {name for name, value in fields.items()
             if not value or type(value) is dict and all(part is None for part in value.values())}
    left_out |= {name for name in empty - known - ASK_WHEN_EMPTY if not near(name, known, 0.85)}
    left_out |= (empty & ASK_NOTHING_WHEN_EMPTY) if 'enable_thinking' in known else THINKING  # of a conversation?
    if fields.get('best_of') == fields.get('n', 1):
        left_out.add('best_of')
    if 'none' in choices or 'auto' in choices and not (functions - left_out) & fields.keys():
        left_out |= {*functions, 'function_call'} | {'tool_choice'} - known
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
    if '{length}' in advice:
        length = next(filter(known.__contains__, LENGTHS), None)
        advice = advice.format(length=length) if length else "leave it out"
    return APIError(400, f"{name[:60]}: {advice}", name[:60], 'unsupported_field')


def shown(value):
    """A value of JSON for an error, in at most some 60 characters, whatever its size and depth."""
    if type(value) in (list, dict):
        return f"a list of {len(value):,}" if type(value) is list else f"an object of {len(value):,}"
    text = repr(value[:46]) if type(value) is str else orjson.dumps(value).decode()
    return text if len(text) <= 60 else text[:45] + '...'


def named(error):
    """The APIError of one of pydantic's errors."""
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
