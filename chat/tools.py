"""
Tools are functions that a client has. The chat template describes them to the model, and the model writes calls of
them, in the form that its template shows:

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>        Hermes, Qwen2.5 and Qwen3
    <tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>      SmolLM2, see smollm2_tools.jinja
    {"name": "add", "parameters": {"a": 1}}                              Llama 3.1 and 3.2, and no text beside it
"""
import json
import re
import secrets
from functools import lru_cache
from typing import NamedTuple

MOST_CALLS = 128   # of one answer
MOST_FORCED = 4    # of one that has to call: a small model may go on until it is cut off
DECODER = json.JSONDecoder(strict=False)  # models write line breaks in texts
# for llguidance: arguments have the blanks that templates show, and no others
SPACING = dict(whitespace_pattern=None, whitespace_flexible=False, item_separator=', ', key_separator=': ')


class Form(NamedTuple):
    """How a model writes a call in JSON: between two tags, or '' for none. arguments: their key. listed: in a list?"""
    opens: str
    closes: str
    arguments: str
    listed: bool = False


HERMES = Form('<tool_call>', '</tool_call>', 'arguments')
LLAMA = Form('', '', 'parameters')
PYTHON_TAG = '<|python_tag|>'  # may stand before a call in the form LLAMA
CALL = dict(id='call_000000001', type='function', function=dict(name='Kx7q', arguments={}))  # shown to a template


class Call(NamedTuple):
    """arguments: an object of JSON, as a text."""
    id: str
    name: str
    arguments: str


@lru_cache(maxsize=16)
def form_of(template):
    """The `Form` of calls that a `ChatTemplate` shows the model, or None for one that is not known here."""
    shown = rendered(template) + rendered(template, dict(role='assistant', tool_calls=[CALL]))
    if tag := re.search(r'<tool_call>\s*(\[?)\s*\{"', shown):  # others write XML after it
        return HERMES._replace(listed=bool(tag[1]))
    return LLAMA if '{"name": function name, "parameters"' in shown else None


@lru_cache(maxsize=16)
def shows_tools(template):
    """Does a `ChatTemplate` describe tools to the model?"""
    return 'Kx7q' in rendered(template)


@lru_cache(maxsize=16)
def takes_several_calls(template):
    """Does a `ChatTemplate` take an answer with two calls? Those of Llama 3 take one, and raise an error at two."""
    one, two = (rendered(template, dict(role='assistant', tool_calls=[CALL] * n)) for n in (1, 2))
    return bool(two or not one)


def rendered(template, *messages):
    """The text of a conversation with a tool named Kx7q, which these messages end; '' where the template fails."""
    function = dict(name='Kx7q', description='', parameters=dict(type='object', properties={}))
    try:
        return template.render([dict(role='user', content='?'), *messages],
                               tools=[dict(type='function', function=function)])
    except ValueError:
        return ''


def grammar(form, tools, several, rule, answer=None):
    """
    A grammar of Lark for an answer that calls these tools, once or, if several, up to MOST_FORCED times. rule: a
    function that returns the rule of a JSON schema. answer: the schema of what the answer may be instead.
    """
    rules = []
    for i, tool in enumerate(tools):
        f = tool['function']
        begin = f'{{"name": {json.dumps(f["name"], ensure_ascii=False)}, "{form.arguments}": '
        rules.append(f'call_{i}: {json.dumps(begin)} {rule(f["parameters"] | {"x-guidance": SPACING})} "}}"')
    call = f'({" | ".join(f"call_{i}" for i in range(len(tools)))})'
    first, between, last = ('[\n', ',\n', '\n]') if form.listed else ('\n', f'\n{form.closes}\n{form.opens}\n', '\n')
    calls = call
    if form.opens:  # without tags it is one call
        more = f'({json.dumps(between)} {call}){{0,{MOST_FORCED - 1}}}' if several else ''
        calls = f'{json.dumps(form.opens + first)} {call} {more} {json.dumps(last + form.closes)}'
    return '\n'.join([f'start: {calls}' + (f' | {rule(answer)}' if answer is not None else ''), *rules])


def certain(text, tag):
    """A growing text without what may belong to a tag that comes next: its first characters, and blanks before it."""
    return text.removesuffix(begun_tag(text, tag)).rstrip()


def begun_tag(text, tag):
    """The longest beginning of a tag, but not all of it, with which a text ends. Both are texts, or both are bytes."""
    return next(tag[:n] for n in range(len(tag) - 1, -1, -1) if text.endswith(tag[:n]))


class Reader:
    """Finds calls of the tools `names` in an answer that comes in pieces. More than `most` are dropped."""

    def __init__(self, form, names, most=MOST_CALLS):
        self.form, self.names, self.most = form, names, most
        self.held, self.is_text, self.follows_a_call = '', False, False

    def push(self, piece, last=False):
        """
        What is certain now: a list of texts and `Call`s in their order. A call comes when it is complete. Blanks beside
        a call are dropped; otherwise all texts together are the answer. last: is this the last piece?
        """
        self.held += piece
        return self.between_tags(last) if self.form.opens else self.bare(last)

    def bare(self, last):
        """An answer that begins as JSON is held to its end, where it is known to be calls or not."""
        text = self.held.strip().removeprefix(PYTHON_TAG).lstrip()
        if not (last or self.is_text) and (text[:1] == '{' or PYTHON_TAG.startswith(text)):
            return []
        calls = self.calls_in(text) if text[:1] == '{' and not self.is_text else None
        self.is_text, said, self.held = calls is None, self.held, ''
        return [said] * bool(said) if calls is None else calls

    def between_tags(self, last):
        found, opens = [], self.form.opens
        while self.held:
            text, opened, rest = self.held.partition(opens)
            inside, closed, rest = self.cut(rest)
            if not opened or not (closed or last):  # what may be the beginning of a call waits
                said = text if last else certain(text, opens)
                self.held = self.held[len(said):]
                return found + self.said(said)
            before, calls = self.behind_tags(inside)
            if calls is None and self.form.closes in inside:  # it is not JSON: the first closing tag ends it
                inside, closed, rest = (inside + closed + rest).partition(self.form.closes)
                before, calls = self.behind_tags(inside)
            text += opened + (inside + closed if calls is None else before)
            found += self.said(text) if calls is None else self.said(text.removesuffix(opens).rstrip()) + calls
            self.follows_a_call |= calls is not None
            self.held = rest
        return found

    def behind_tags(self, inside):
        """(the text before, the calls) of what two tags enclose: a text may mention a tag, and call behind another."""
        tags = re.finditer(re.escape(self.form.opens) + r'(?=\s*[{\[])', inside)
        for start in [0, *(tag.end() for tag in tags)]:
            if (calls := self.calls_in(inside[start:])) is not None:
                return inside[:start], calls
        return '', None

    def cut(self, text):
        """(the inside of a call, its closing tag, the rest). A closing tag inside of a text of JSON does not count."""
        n_quotes = 0
        for found in re.finditer(r'\\["\\]|"|' + re.escape(self.form.closes), text):
            if found[0] == self.form.closes and n_quotes % 2 == 0:
                return text[:found.start()], found[0], text[found.end():]
            n_quotes += found[0] == '"'
        return text, '', ''

    def said(self, text):
        text = text.lstrip() if self.follows_a_call else text
        self.follows_a_call &= not text
        return [text] * bool(text)

    def calls_in(self, text):
        """The calls of a text, one object or list after the other; None if it is anything else."""
        values, calls = [], []
        try:
            while text := text.lstrip(' \t\r\n,;'):
                value, end = DECODER.raw_decode(text)
                values += value if type(value) is list else [value]
                text = text[end:]
            for value in values:
                both = [value.get(name) for name in ('arguments', 'parameters')]  # some mix the two
                given = next((each for each in both if each is not None), {})
                given = DECODER.decode(given) if type(given) is str else given
                if value['name'] not in self.names or type(given) is not dict:
                    return None
                arguments = json.dumps(given, ensure_ascii=False, allow_nan=False)
                arguments.encode()  # no lone surrogates
                calls.append(Call(f'call_{secrets.token_hex(12)}', value['name'], arguments))
        except (ValueError, KeyError, AttributeError, RecursionError):
            return None
        if not values:
            return None
        calls = calls[:self.most]
        self.most -= len(calls)
        return calls
