"""What a model is trained on in a conversation: the tokens that the assistant has said."""
import json
import re
from itertools import product

import numpy as np

from formats.tokenizer_files import json_tokenizer

BEGIN, END = '\ufdd0', '\ufdd1'  # noncharacters of Unicode, which texts should not have
PLAIN = """\
{% for message in messages %}
### {{ message.role }}
{% if message.role == 'assistant' %}
{% generation %}
{{ message.content | trim }}{{ END }}
{%- endgeneration %}{{ '\\n' }}{% else %}
{{ message.content | trim }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
### assistant
{% endif %}
"""  # END stands for the token that ends an answer


def chat_tokenizer(tokenizer):
    """The tokenizer, with PLAIN as its chat template if it has none. ValueError if no token ends a text."""
    if tokenizer.chat_template:
        return tokenizer
    if not tokenizer.end_tokens:
        raise ValueError("a conversation needs a token that ends an answer, and this tokenizer has none: take a model "
                         "with byte pairs (data/shakespeare/prepare.py --vocab_size=4096)")
    end = tokenizer.bytes_of_tokens()[tokenizer.end_tokens[0]].decode()
    return json_tokenizer(tokenizer, PLAIN.replace('END', json.dumps(end)))


def scored_tokens(tokenizer, messages):
    """
    The tokens of a conversation, (n,), and which of them are scored, bool (n,): what the assistant says, and the token
    that ends it. The chat template may mark these by {% generation %}, as for transformers. Otherwise an answer begins
    where the prompt for it ends, and ends with the first end token. ValueError if the template does not show where an
    answer is, or does not take the conversation.
    """
    template, spans = tokenizer.chat_template, []
    if re.search(f'[{BEGIN}{END}]', json.dumps(messages, ensure_ascii=False)):
        raise ValueError("a message has the character U+FDD0 or U+FDD1, which mark answers here: leave them out")
    text = template.render(messages, add_generation_prompt=False, answer_begins=BEGIN, answer_ends=END)
    *marked, rest = re.split(f'{BEGIN}([^{END}]*){END}', text)
    if marked:
        ends = np.cumsum([len(piece) for piece in marked])
        spans = [*zip(ends[::2], ends[1::2])]
        text = ''.join([*marked, rest])
    encoding = tokenizer.encoding(text, add_special_tokens=False)
    ids, (starts, ends) = np.array(encoding.ids), np.array(encoding.offsets).reshape(-1, 2).T
    answers = [i for i, message in enumerate(messages) if message['role'] == 'assistant']
    for i, end in product(answers, tokenizer.end_tokens):
        name = tokenizer.token_bytes[end].decode('utf-8', 'replace')
        if name in messages[i]['content'] and end in tokenizer.special_ids:
            raise ValueError(f"message {i + 1}, of the assistant, has the text {name}, the token that ends an answer: "
                             "leave it out")
    for i in [] if marked else answers:
        before = template.render(messages[:i])
        stops = np.flatnonzero(np.isin(ids, tokenizer.end_tokens) & (starts >= len(before)))
        is_shown = not (words := messages[i]['content'].split()) or any(word in text[len(before):] for word in words)
        if not text.startswith(before) or not len(stops) or not is_shown:
            raise ValueError(f"the chat template does not show where message {i + 1}, of the assistant, begins and "
                             "ends: put a message of the user before it, or {% generation %} and "
                             "{% endgeneration %} around it in the template")
        spans.append((len(before), ends[stops[0]]))
    scored = np.zeros(len(ids), bool)
    for start, end in spans:
        scored |= (ends > start) & (starts < end)
    return ids, scored
