"""
What the text of a sample must be: JSON of a schema, a regular expression, one of several texts, or a grammar.

    constraint = compiled('regex', '[0-9]+', Vocabulary(tokenizer, model.config.vocab_size))
    engine.generate([prompt], 20, constraint=constraint)

The library llguidance, see grammars.py, computes which tokens may come next: those after which the text can still be
completed in its form. This holds for any vocabulary. A sample ends when its text is complete and nothing may follow. If
the text may end or go on, the tokens that end the sample are allowed too.
"""
import os
import re
from functools import lru_cache

import numpy as np

from chat.tools import begun_tag
from serving.grammars import grammar_of


class Vocabulary:
    """
    The tokens of a model, as llguidance takes a tokenizer. tokens: the bytes of each id. Special tokens have no text.
    end: the id after the last one, with which llguidance ends a text. If it allows that id, `Constraint` allows the
    tokens that end a sample. ValueError if the library is not installed.
    """
    is_tokenizer_wrapper, eos_token_id, bos_token_id = True, None, None

    def __init__(self, tokenizer, n_rows):
        try:
            import llguidance
        except ImportError as e:
            raise ValueError("the form of a text needs the library llguidance: pip install llguidance") from e
        self.end, self.end_bit = n_rows, bitmap([n_rows], n_rows)
        self.special_token_ids = [i for i in tokenizer.special_ids if i < n_rows]
        self.tokens = tokenizer.bytes_of_tokens()[:n_rows]
        self.tokens += [b''] * (n_rows - len(self.tokens))  # what a tokenizer does not know cannot come
        self.library = llguidance.LLTokenizer(self)
        self.executor = llguidance.LLExecutor(os.cpu_count())


class DeadEnd(ValueError):
    """The text of a sample cannot go on in its form."""


class Constraint:
    """
    Which tokens of a sample may come next. ends: the tokens that end the sample, allowed where the text may end; the
    draw takes them only after min_tokens others. tag: the form is that of what follows these bytes; before them all
    tokens are allowed but the ends and what goes on behind the tag.
    """

    def __init__(self, vocabulary, beginning, ends=(), min_tokens=0, tag=b''):
        self.vocabulary, self.beginning, self.matcher = vocabulary, beginning, None  # matchers; one after no token
        self.ends, self.min_tokens = bitmap(ends, vocabulary.end), min_tokens
        self.allowed = bitmap([], vocabulary.end)  # of the token after the first n_taken, see `DrawSettings`
        self.n_taken, self.n_new = None, 0         # n_taken is None until `write` has written it
        self.is_complete = False                   # may nothing follow?
        # why the text cannot go on: a `DeadEnd` if the vocabulary lacks what must follow, or if the form is too large
        # for the library, and a RuntimeError if a token came that was not allowed
        self.error = None
        self.tag, self.tail = tag, b''             # tail: the last bytes, as long as the tag may come in them

    def behind(self, tag):
        """The constraint of what follows a tag, a text, in a sample."""
        return Constraint(self.vocabulary, self.beginning, tag=tag.encode())

    def for_sample(self, ends, min_tokens=0):
        """A constraint for a new sample. Raises its error if no first token can be drawn."""
        new = Constraint(self.vocabulary, self.beginning, ends, min_tokens, self.tag)
        new.take(())
        new.write([new])
        if new.error:
            raise new.error
        return new

    def take(self, drawn):
        """Take the tokens that are new among all that the sample has drawn. `write` comes next."""
        known, self.n_taken = self.n_taken, None  # an exception may come at any place: then all are taken again
        if known is None:
            self.matcher, known, self.tail = self.beginning.deep_copy(), 0, b''
        while known < len(drawn) and self.tag not in self.tail:
            self.tail = self.tail[-len(self.tag):] + self.vocabulary.tokens[drawn[known]]
            known += 1
        self.matcher.consume_tokens(list(drawn[known:]))
        self.n_new = len(drawn)

    @staticmethod
    def write(constraints):
        """Write `allowed` of several samples side by side."""
        from llguidance.numpy import fill_next_token_bitmask_par
        vocabulary = constraints[0].vocabulary
        rows = np.empty((len(constraints), vocabulary.end // 32 + 1), np.int32)
        fill_next_token_bitmask_par(vocabulary.executor, [(c.matcher, i) for i, c in enumerate(constraints)], rows)
        for c, row in zip(constraints, rows):
            if c.tag not in c.tail:
                c.allowed[:] = allowed_before(c.tag, begun_tag(c.tail, c.tag), vocabulary) & ~c.ends
                c.n_taken = c.n_new
                continue
            c.allowed.view(np.int32)[:len(row)] = row
            may_end = (c.allowed & vocabulary.end_bit).any()
            c.allowed &= ~vocabulary.end_bit
            if c.matcher.is_error():
                c.error = dead_end_of(line_of(c.matcher.get_error()))
            elif c.n_new < c.min_tokens and c.allowed.any() and not (c.allowed & ~c.ends).any():
                c.error = DeadEnd("the form allows only tokens that end the text here, and "
                                  f"{c.min_tokens} others must come first: lower min_tokens, or name fewer stop tokens")
            c.is_complete = bool(c.error) or not c.allowed.any()
            if may_end:
                c.allowed |= c.ends
            c.n_taken = c.n_new


def bitmap(tokens, n):
    """A bitmap of these tokens, int64 (n // 64 + 1,)."""
    bits = np.zeros(64 * (n // 64 + 1), np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder='little').view(np.int64)


@lru_cache(maxsize=64)
def allowed_before(tag, begun, vocabulary):
    """The tokens that may follow the beginning of a tag: none that ends it and goes on with more than blanks."""
    tokens = enumerate(vocabulary.tokens)
    return bitmap([i for i, token in tokens if not (begun + token).partition(tag)[2].strip()], vocabulary.end)


@lru_cache(maxsize=16)
def compiled(kind, text, vocabulary):
    """
    The `Constraint` of a form, see `grammars.grammar_of`. ValueError, with what the library says, for a form that it
    refuses, and for one in which this vocabulary can write no text.
    """
    import llguidance
    limits = llguidance.LLParserLimits(max_lexer_states=20_000, verbose_errors=False)
    matcher = llguidance.LLMatcher(vocabulary.library, grammar_of(kind, text), log_level=0, limits=limits)
    if matcher.is_error():
        said = line_of(matcher.get_error())
        raise ValueError(said if kind == 'grammar' else re.sub(r'^(at )?\d+\(\d+\): ', '', said))
    constraint = Constraint(vocabulary, matcher)
    if constraint.for_sample(()).is_complete:
        raise ValueError("no text but the empty one has this form")
    return constraint


def dead_end_of(said):
    """The exception for what the library says of a text that cannot go on."""
    if 'NoExtension' in said:
        return DeadEnd("the text cannot go on in its form: no token of this model's vocabulary has the characters that "
                       "must follow")
    if re.search('TooComplex|Too many|max is', said):
        return DeadEnd(f"the text cannot go on in its form, which is too large: give a simpler one ({said})")
    return RuntimeError(f"the text cannot go on in its form: {said}")


def line_of(message):
    """What the library says, in one line, without the grammar that it shows after it."""
    return ' '.join(re.split(r'\n *\d+ \| ', message)[0].split()).removesuffix(' <non-verbose/>')[:300]
