"""
How good a model is: bits per byte of any text, and multiple choice by log likelihood, with standard errors. The figures
are those of lm-eval (https://github.com/EleutherAI/lm-evaluation-harness) on the same task.
"""
import math

import torch

from benchmarks.harness import Part
from benchmarks.ours import log_likelihoods
from benchmarks.shapes import label, trained
from tokenizer import read_json_lines, read_text

CPU_ONLY = "models are evaluated"
AT_ONCE = 16  # questions, whose contexts all fit into the pool
FORM = '{"question": "...", "choices": ["...", ...], "answer": 0}, with the number of the right choice'


def rows(asked, name, read, figures):
    """A row with the figures of the model on each file that the setting `name` names; nothing without files."""
    files = {path: read(path) for path in getattr(asked, name).split(',') if path}
    if files:
        model, tokenizer = trained(asked.init_from or 'resume')
        yield [{'model': label(asked.init_from), name: path, **figures(model, tokenizer, content)}
               for path, content in files.items()]


def bits_of(model, tokenizer, text):
    """
    The text is cut into pieces of block_size tokens. A token is predicted from the tokens before it in its piece and
    the last token before the piece. The last piece is shorter, so more tokens are put before it, up to block_size in
    all. The token with which texts begin stands before the text. If there is none, the first token is not predicted.
    """
    size, tokens = model.config.block_size, tokenizer.encode(text, add_special_tokens=False)
    n_bytes, begin = len(text.encode()), begin_of(tokenizer)
    if begin is None:
        n_bytes -= len(tokenizer.token_bytes[tokens[0]]) if tokens else 0
    else:
        tokens = [begin, *tokens]
    if len(tokens) < 2:
        raise ValueError(f"a text needs at least two tokens to be predicted, not {len(tokens)}")
    ends = [min(start + size, len(tokens) - 1) for start in range(0, len(tokens) - 1, size)]
    pairs = [(tokens[max(0, end - size):start + 1], tokens[start + 1:end + 1]) for start, end in zip([0, *ends], ends)]
    pieces = log_likelihoods(model)(pairs)
    n, lengths = len(pieces), torch.tensor([len(piece) for piece in pieces])
    nats = -torch.stack([piece.sum() for piece in pieces])
    mean, bits = (nats.sum() / lengths.sum()).item(), nats.sum().item() / math.log(2) / n_bytes
    spread = (nats - mean * lengths).square().sum()  # of a ratio of two sums over pieces; one piece shows none
    error = (spread * n / (n - 1)).sqrt().item() / math.log(2) / n_bytes if n > 1 else None
    return dict(bytes=n_bytes, tokens=int(lengths.sum()), nats_per_token=mean, bits_per_byte=bits, standard_error=error)


def begin_of(tokenizer):
    """The token before a text: its bos_token, its <|endoftext|>, or another one that ends a text. None without one."""
    named = getattr(tokenizer, 'special_tokens', {}).get('bos_token')
    begin = tokenizer.library.token_to_id(named) if named else None
    return begin if begin is not None else next(iter(tokenizer.end_tokens), None)


def accuracies(model, tokenizer, lines):
    """
    acc: the share of questions whose answer has the highest log likelihood after the question and a blank. acc_norm:
    the same with log likelihoods divided by the number of characters. The choices of a question share its pages.
    """
    questions, right = [], []
    for line in lines:  # all of them before the first one is scored, which takes long
        try:
            questions.append([encoded(model, tokenizer, line['question'], ' ' + choice) for choice in line['choices']])
        except ValueError as e:
            raise ValueError(f"{line['place']}: {e}") from e
    score = log_likelihoods(model)
    for i in range(0, len(lines), AT_ONCE):
        pairs = questions[i:i + AT_ONCE]
        first = score([of_question[0] for of_question in pairs])
        others = iter(score([pair for of_question in pairs for pair in of_question[1:]]))
        for line, one, of_question in zip(lines[i:], first, pairs):
            sums = torch.stack([one.sum(), *(next(others).sum() for _ in of_question[1:])])
            lengths = torch.tensor([len(choice) for choice in line['choices']])
            right.append([sums.argmax() == line['answer'], (sums / lengths).argmax() == line['answer']])
    acc, acc_norm = torch.tensor(right).double().mean(0).tolist()
    n = len(right)
    error, error_norm = (math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else None for p in (acc, acc_norm))
    return dict(questions=n, acc=acc, acc_error=error, acc_norm=acc_norm, acc_norm_error=error_norm)


def encoded(model, tokenizer, context, continuation):
    """The tokens of a context and of its continuation. The context loses its first ones above block_size + 1 in all."""
    blanks = context[len(context.rstrip()):]
    context, continuation = context.rstrip(), blanks + continuation  # a blank begins a word
    n, whole = len(tokenizer.encode(context)), tokenizer.encode(context + continuation)
    if not n:
        raise ValueError("a question must not be empty, since its choices are scored after it: leave the line out")
    before, behind = whole[:n], whole[n:]
    if len(behind) > model.config.block_size:
        raise ValueError(f"the choice {continuation[:40]!r} has {len(behind):,} tokens, and the model's context "
                         f"{model.config.block_size:,}: leave its question out")
    return before[-max(1, model.config.block_size + 1 - len(behind)):], behind


def read_questions(path):
    """
    The lines of a JSONL file, dicts, and the place of each. ValueError if there is none, or, with its place, if one is
    no question.
    """
    lines = [line | dict(place=place) for place, line in read_json_lines(path, FORM, is_question)]
    if not lines:
        raise ValueError(f"{path} has no questions: each of its lines must be {FORM}")
    return lines


def is_question(line):
    choices, answer = line['choices'], line['answer']
    return (isinstance(line['question'], str) and isinstance(choices, list)
            and all(isinstance(choice, str) and choice for choice in choices)
            and type(answer) is int and 0 <= answer < len(choices))


PARTS = dict(
    text=Part(lambda asked: rows(asked, 'text', read_text, bits_of), 1, "bits per byte of a text",
              'model text bytes tokens nats_per_token bits_per_byte standard_error'),
    choices=Part(lambda asked: rows(asked, 'choices', read_questions, accuracies), 1,
                 "multiple choice by log likelihood", 'model choices questions acc acc_error acc_norm acc_norm_error'))
