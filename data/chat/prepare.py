"""
Conversations to train a chat model on: train.bin and val.bin, train_marks.bin and val_marks.bin (what is scored, and
where a conversation begins), meta.json and the tokenizer's files in this folder.

    python data/chat/prepare.py                              the conversations of this folder, for SmolLM2-135M-Instruct
    python data/chat/prepare.py --tokenizer=out-tinystories  the same for another model
    python data/chat/prepare.py --input=a.jsonl,b.jsonl      others

A line of a file is a conversation in OpenAI's format: {"messages": [{"role": "user", "content": "Hello"}, ...]}. Those
with "held_out": true are for validation; if there are none, every tenth one is.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
import configurator  # isort: skip

import numpy as np

from chat.answers import chat_tokenizer, scored_tokens
from checkpoint import tokenizer_named
from data import prepare_text
from tokenizer import read_json_lines
from training.conversations import FIRST, SCORED

input = ''  # files with commas between; by default kv_cache.jsonl in this folder
tokenizer = 'data/real/SmolLM2-135M-Instruct.Q4_1.gguf'  # of the model: what init_from of train.py takes

FORM = '{"messages": [{"role": "user", "content": "..."}, ...]}'
ROLES = 'system', 'developer', 'user', 'assistant', 'tool', 'function'


def main(config):
    folder = os.path.dirname(os.path.abspath(__file__))
    made, parts = chat_tokenizer(tokenizer_named(tokenizer)), dict(val=[], train=[])
    paths = input.split(',') if input else [os.path.join(folder, 'kv_cache.jsonl')]
    found = [pair for path in paths for pair in read_json_lines(path, FORM, is_conversation)]
    has_held_out = any(line.get('held_out') for _, line in found)
    for i, (where, line) in enumerate(found):
        is_held_out = line.get('held_out') if has_held_out else i % 10 == 9
        try:
            ids, scored = scored_tokens(made, line['messages'])
        except ValueError as e:
            raise ValueError(f"{where}: {e}") from e
        if not scored[1:].any():
            raise ValueError(f"{where}: the assistant says nothing that is scored: leave the line out")
        parts['val' if is_held_out else 'train'].append((ids, scored))
    if not all(parts.values()):
        raise ValueError(f"there are {len(parts['train'])} conversations to train on and {len(parts['val'])} to "
                         'validate, but both need one: give ten or more, or mark some with "held_out": true')
    prepare_text.write_meta(folder, made, source=', '.join(map(os.path.basename, paths)),
                            conversations={split: len(rows) for split, rows in parts.items()})
    said = []  # it is printed at the end: a closed pipe would leave half of the files
    for split, rows in parts.items():
        marks = np.concatenate([scored * SCORED + (np.arange(len(ids)) == 0) * FIRST for ids, scored in rows])
        prepare_text.write(os.path.join(folder, f'{split}_marks.bin'), marks.astype(np.uint8).tobytes())
        tokens = np.concatenate([ids for ids, _ in rows]).astype(prepare_text.dtype_of(made))
        prepare_text.write(os.path.join(folder, f'{split}.bin'), tokens.tobytes())
        said.append(f"{split}.bin: {len(rows):,} conversations, {len(tokens):,} tokens, {(marks & SCORED).sum():,} of "
                    f"them scored; the longest has {max(len(ids) for ids, _ in rows):,}")
    print('\n'.join(said))


def is_conversation(line):
    """Does a line of a file have messages? ValueError if a model cannot be trained on them."""
    if line.get('held_out') not in (None, False, True):
        raise ValueError(f'"held_out" must be true or false, not {line["held_out"]!r:.40}')
    for i, message in enumerate(messages := line['messages'], 1):
        if message.get('tool_calls') or message.get('function_call'):
            raise ValueError(f"message {i} calls tools, but only texts can be trained on: leave the line out")
        if message.get('weight') not in (None, 1):
            raise ValueError(f"message {i} has the weight {message['weight']!r:.20}, but every message counts the "
                             "same: leave the weight out")
        role, content = message['role'], message['content']
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"role and content of message {i} must be texts")
        if role not in ROLES:
            raise ValueError(f"the role of message {i} must be one of {', '.join(ROLES)}, not {role!r:.40}")
        if role == 'assistant' and not content.strip():
            raise ValueError(f"message {i}, of the assistant, is empty, and a model would learn to say nothing: leave "
                             "the line out")
    return messages


if __name__ == '__main__':
    configurator.run(main)
