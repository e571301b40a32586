"""
What form a text has, as a grammar for llguidance (https://github.com/guidance-ai/llguidance).

Some grammars take minutes to compile, such as `multipleOf` 4,000,007, and a chain of 2,000 references ends the process.
So each is first compiled in a process that has no other task, see chat/template.py, and if that went well again here.
"""
import json
import math
import sys
from decimal import Decimal

if __name__ == '__main__':  # the process that compiles
    sys.path += sys.argv[1:]

# isort: split
from chat.template import answer_of, serve

MOST_CHARACTERS = 2**17  # of a schema, an expression, a grammar, or all choices
SECONDS = 2.0            # of the processor, for compiling one
# between the parts of JSON, which allows any number: a small model may write blanks without end
BLANKS = r' |\n{1,2} {0,20}'
# the model chooses how a text is divided into tokens, and the library forces no division
OPTIONS = '\n%llguidance {"no_forcing": true}\n'

# keywords of a schema whose value is a dict {name: schema}
NAMED = 'properties', 'patternProperties', '$defs', 'definitions', 'dependentSchemas', 'dependencies'
PLAIN = {'type', 'properties', 'required', 'title', 'description', '$defs', 'definitions', '$schema', '$id', '$comment',
         'examples', 'default', 'deprecated', 'x-guidance'}  # of an object that says nothing of other properties
COMBINING = {'not', 'if', 'dependentSchemas', 'dependencies'}  # by these several schemas describe one object
ELSEWHERE = {'allOf', 'anyOf', 'oneOf', '$ref'}  # by these too, where two stand together, or one beside OF_OBJECTS
OF_OBJECTS = {'properties', 'required', 'additionalProperties', 'patternProperties', 'unevaluatedProperties',
              'minProperties', 'dependentRequired'}
waiting = []             # processes that wait for a question


def grammar_of(kind, text):
    """
    The grammar of a form, a text that llguidance reads. kind, text: json_schema, a JSON schema as text; regex, a
    regular expression (Rust's, which the whole text matches); choice, texts, a tuple; grammar, llguidance's kind of
    Lark, or llama.cpp's GBNF; tools, the grammar of their calls. ValueError if it cannot be read or takes too long to
    compile. Other errors are not found here.
    """
    n = len(text) if kind != 'choice' else sum(map(len, text))
    if n > MOST_CHARACTERS:
        raise ValueError(f"it has {n:,} characters, and at most {MOST_CHARACTERS:,} are allowed: give a shorter one")
    return answer_of(__file__, waiting, [kind, text], SECONDS, "compiling it", "give a simpler one")


def json_rule(schema):
    """The right side of a rule of Lark for the JSON of a schema, a dict, see `closed`."""
    given = schema.get('x-guidance', {})
    if type(given) is not dict:
        raise ValueError(f"x-guidance must be an object of llguidance's options, not {given!r:.40}")
    numbers = [n for each in subschemas(schema) for key in ('const', 'enum') for n in numbers_in(each.get(key))]
    if (number := next(filter(may_be_rounded, numbers), None)) is not None:
        raise ValueError(f"const or enum has the number {number!r}, which the library may round: give an integer "
                         "up to 2**53, a float of up to 15 digits from 1e-7 to 1e22, or a text")
    options = {'whitespace_pattern': BLANKS} | given
    return f"%json {json.dumps(closed(schema) | {'x-guidance': options})}"


def subschemas(schema):
    """All schemas within a schema, and itself, a list."""
    found, parts = [], [(schema, False)]  # and whether the keys of a dict are names
    while parts:
        part, has_names = parts.pop()
        if type(part) is dict and not has_names:
            found.append(part)
        pairs = part.items() if type(part) is dict else enumerate(part) if type(part) is list else ()
        parts += [(each, not has_names and key in NAMED) for key, each in pairs
                  if has_names or key not in ('const', 'enum', 'default', 'examples')]
    return found


def closed(schema):
    """
    A schema whose objects have only the properties that it names, unless it says something else about others. A small
    model would invent others until it is cut off. llama.cpp and xgrammar do the same. If several schemas describe one
    object, each would exclude the properties of the others: then only the outermost object is closed.
    """
    schema = json.loads(json.dumps(schema))
    found = subschemas(schema)
    if any(each.keys() & COMBINING or each.keys() & ELSEWHERE and len(each.keys() & (ELSEWHERE | OF_OBJECTS)) > 1
           or type(each.get('allOf')) is list and len(each['allOf']) > 1 for each in found):
        found = [schema]
    for each in found:
        names, required = each.get('properties'), each.get('required', [])
        if type(names) is dict and type(required) is list and each.keys() <= PLAIN and (
                all(type(name) is str and name in names for name in required)):
            each['additionalProperties'] = False
    return schema


def numbers_in(value):
    if type(value) in (int, float):
        yield value
    for part in value.values() if type(value) is dict else value if type(value) is list else ():
        yield from numbers_in(part)


def may_be_rounded(number):
    """The library reads digits as a float, times a power of ten: that is exact up to 2**53 and 10**22."""
    if type(number) is int:
        return abs(number) >= 2**63 or float(number) != number
    if not math.isfinite(number):
        return True
    number = Decimal(repr(number)).as_tuple()
    return int(''.join(map(str, number.digits))) > 2**53 or abs(number.exponent) > 22


# The functions below run in the process that compiles.

def lark_of(kind, text):
    """The form that `grammar_of` takes, as Lark."""
    from llguidance import regex_to_lark
    from llguidance.gbnf_to_lark import any_to_lark
    if kind in ('grammar', 'tools'):
        return any_to_lark(text)
    if kind == 'regex':
        return f"start: /{regex_to_lark(text)}/" if text else 'start: ""'
    if kind == 'choice':
        # one lexeme: the library reads at most 2,000 alternatives of a rule
        return "start: TEXT\nTEXT: " + ' | '.join(json.dumps(each, ensure_ascii=False) for each in text)
    schema = json.loads(text)
    if type(schema) is not dict:
        raise ValueError(f"the schema must be a JSON object, not {text[:40]}")
    return f"start: {json_rule(schema)}"


def answer(kind, text):
    """('text', the grammar) or ('error', why not), once the grammar was compiled for single bytes."""
    from llguidance import LLMatcher, LLTokenizer
    try:
        grammar = json.dumps({'grammars': [{'lark_grammar': lark_of(kind, text) + OPTIONS}]})
    except Exception as e:  # the library has several kinds
        return 'error', f"it cannot be read: {e}"[:300]
    LLMatcher(LLTokenizer('byte'), grammar, log_level=0).compute_bitmask()
    return 'text', grammar


if __name__ == '__main__':
    serve(answer, ['llguidance', 'llguidance.gbnf_to_lark'])
