"""The model that is served, and the `Request`s that a body asks it for."""
import secrets
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain

import orjson

from chat.thoughts import behind_thoughts
from chat.tools import form_of, grammar, shows_tools, takes_several_calls
from decode.draw import SETTING_NAMES
from serving.api import APIError, invalid
from serving.bodies import MOST_SAMPLES, ChatBody
from serving.constraints import Vocabulary, compiled
from serving.grammars import json_rule
from serving.request import Request

MOST_ENTRIES = 2**20  # of one answer: token ids and log probabilities, some 60 bytes each


@dataclass(frozen=True)
class Served:
    """The model that is served."""
    name: str
    tokenizer: object
    token_bytes: list     # of each token id
    max_tokens: int       # of a request with its answer
    created: int = 0
    defaults: dict = field(default_factory=dict)  # of sampling fields that a body leaves out, see `generation_defaults`
    aliases: tuple = ()   # other names that requests may use

    def check_name(self, model):
        """APIError 404 unless the model is this one, or not named."""
        if model not in ('', self.name, *self.aliases):
            raise APIError(404, f"there is no model {model[:100]!r} here: the one that is served is {self.name!r}",
                           'model', 'model_not_found')

    def check_ids(self, field, ids):
        """APIError 400 unless all token ids, of the field with this name, are in the vocabulary."""
        n = len(self.token_bytes)
        for token in ids:
            if not 0 <= token < n:
                raise invalid(field, f"{field} has the token id {token}, and the vocabulary has the ids 0 to {n - 1}")

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
        if (body.tools or has_calls) and not shows_tools(self.tokenizer.chat_template):
            raise invalid('tools' if body.tools else 'messages', "tools are not in this model's chat template: "
                          "describe them in a message, or start serve.py with --chat_template=, a file with another")
        self.check_length('messages', sum(
            len(message.content) + len(message.reasoning_content) for message in body.messages))
        try:
            return self.tokenizer.conversation(messages, **body.variables)
        except RecursionError:
            raise invalid('chat_template_kwargs', "tools or chat_template_kwargs are nested too deeply for the "
                          "chat template: send them with fewer levels") from None
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
    asked, room = body.most_tokens if is_chat else body.max_tokens, served.max_tokens - n_prompt
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
    The `forms` of a `ChatBody`. If its answer must call a tool, or may call one instead of writing JSON, they are a
    grammar of calls. APIError 400 if there is no such tool, or if the form of the model's calls is not known.
    """
    template, forms, answer = served.tokenizer.chat_template, body.forms, None
    form = body.tools and form_of(template)
    if body.tool_choice not in ('none', 'auto'):
        missing = {*body.callable_names} - {tool['function']['name'] for tool in body.tools}
        if missing or not body.tools:
            raise invalid('tool_choice', f"tool_choice asks for {''.join(missing)[:64] or 'a call'}, and tools has "
                                         f"{'no such tool' if body.tools else 'none'}: add it there, or leave "
                                         "tool_choice out")
        if form is None:
            raise invalid('tool_choice', "tool_choice: the chat template does not show how the model writes calls: "
                                         "leave it out, and read the answer as text")
    else:
        (kind, text), *others = forms.values() or [('', '')]
        if not form or others or kind != 'json_schema':
            return forms
        answer = orjson.loads(text)
    tools = [tool for tool in body.tools if tool['function']['name'] in body.callable_names]
    several = body.may_call_several and takes_several_calls(template)
    try:
        return {'tools': ('tools', grammar(form, tools, several, json_rule, answer))}
    except RecursionError:
        raise invalid('tools', "the schema of a tool is nested too deeply: send one with fewer levels") from None
    except ValueError as e:
        raise invalid('tools', f"the schema of a tool or of response_format cannot be used: {e}") from None


def requests_of(body, served, id, deliver):
    """
    A `Request` for each prompt of a `CompletionBody`, or the one of a `ChatBody`. APIError where a value does not fit
    the model.

    deliver: called with the number of a request, and with its outputs. A body without a seed gets one for each prompt,
    drawn here.
    """
    is_chat, strip = isinstance(body, ChatBody), False
    if is_chat:
        if body.top_logprobs and not body.logprobs:
            raise invalid('top_logprobs', "top_logprobs needs logprobs: add it, or leave both out")
        prompts, strip = [served.conversation(body)], served.tokenizer.strips and not body.continue_final_message
    else:
        prompts = [served.encode(prompt, body.add_special_tokens) if type(prompt) is str else prompt
                   for prompt in body.prompt]
    served.check_ids('prompt', chain(*prompts))  # before the bytes of these ids are looked up
    constraint = served.constraint(forms_of(body, served) if is_chat else body.forms)
    if is_chat:
        constraint = behind_thoughts(constraint, prompts[0], served.token_bytes)
    seeds = [secrets.randbelow(2**63 - MOST_SAMPLES) if body.seed is None else body.seed for _ in prompts]
    shared = dict(
        n=body.n, draw={name: getattr(body, name) for name in (*SETTING_NAMES, 'min_tokens', 'logit_bias')},
        stop=tuple(body.stop), stop_token_ids=body.stop_token_ids, ignore_eos=body.ignore_eos, logprobs=body.n_logprobs,
        prompt_logprobs=not is_chat and body.echo and body.n_logprobs is not None, cache_salt=body.cache_salt,
        include_stop=body.include_stop_str_in_output, constraint=constraint, strip=strip and constraint is None,
        skip_special=body.skip_special_tokens and not (is_chat and body.tools))  # special tokens may mark a call
    requests = [Request(f'{id}-{i}', prompt, n_new_tokens(body, served, len(prompt)), seed,
                        deliver=partial(deliver, i), **shared)
                for i, (prompt, seed) in enumerate(zip(prompts, seeds))]
    for request in requests:
        if not request.prompt:
            raise invalid('prompt', "prompt has no tokens: it must have at least one, for example a newline")
        if body.min_tokens > request.max_tokens:
            raise invalid('min_tokens', f"min_tokens is {body.min_tokens}, and an answer may have {request.max_tokens} "
                                        "tokens at most: lower it, or allow more tokens")
    served.check_ids('stop_token_ids', body.stop_token_ids)
    served.check_ids('logit_bias', body.logit_bias)
    check_entries(body, requests)
    return requests
