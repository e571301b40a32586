"""
Thoughts: what a model writes between <think> and </think> before its answer, as Qwen3, SmolLM3, DeepSeek-R1 and others
do. Their chat templates leave the thoughts of earlier answers out of a prompt.
"""
from typing import NamedTuple

from chat.tools import certain
from tokenizer import THOUGHT_TAGS

OPENS, CLOSES = THOUGHT_TAGS


def thinks(template):
    """Does a `ChatTemplate` know thoughts?"""
    return CLOSES in template.source


def opens_thoughts(prompt, token_bytes):
    """Does a prompt, token ids, end with OPENS? token_bytes: those of each id."""
    return b''.join(token_bytes[token] for token in prompt[-16:]).rstrip().endswith(OPENS.encode())


def behind_thoughts(constraint, prompt, token_bytes):
    """A `Constraint` of an answer to a prompt, or None. It begins behind the thoughts if the prompt opens them."""
    return constraint.behind(CLOSES) if constraint and opens_thoughts(prompt, token_bytes) else constraint


class Thought(NamedTuple):
    """A piece of what a model thinks."""
    text: str


class ThoughtReader:
    """
    Parts what a model writes into thoughts, which come first if there are any, and its answer. opened: does the prompt
    end with OPENS?

    state: BEGINS, until it is known whether there are thoughts; THINKS; ANSWERS.
    """
    BEGINS, THINKS, ANSWERS = range(3)

    def __init__(self, opened):
        self.state, self.has_thoughts = self.THINKS if opened else self.BEGINS, opened
        self.held, self.drops_blanks = '', opened
        self.n_taken, self.tail = 0, b''  # tokens up to the end of thoughts, if there are any, and their last bytes

    @property
    def n_tokens(self):
        """How many tokens so far are of the thoughts and their tags."""
        return self.n_taken if self.has_thoughts else 0

    def push(self, piece, tokens=(), last=False):
        """
        What is certain now: (more thoughts, more of the answer), two texts. Blanks at both ends of the thoughts are
        dropped. tokens: the bytes of each token that came with the piece. last: is this the last piece?
        """
        for token in tokens if self.state != self.ANSWERS else ():
            if CLOSES.encode() not in self.tail:
                self.n_taken, self.tail = self.n_taken + 1, self.tail[-len(CLOSES):] + token
        thought = said = ''
        self.held += piece
        if self.state == self.BEGINS:
            text = self.held.lstrip()
            if text.startswith(OPENS):
                self.state, self.has_thoughts, self.drops_blanks, self.held = self.THINKS, True, True, text[len(OPENS):]
            elif last or not OPENS.startswith(text):
                self.state = self.ANSWERS
        if self.state == self.THINKS:
            self.drop_blanks()
            thought, closed, rest = self.held.partition(CLOSES)
            thought = thought.rstrip() if closed or last else certain(thought, CLOSES)
            self.held = self.held[len(thought):]
            if closed:
                self.state, self.drops_blanks, self.held = self.ANSWERS, True, rest
        if self.state == self.ANSWERS:
            self.drop_blanks()
            said, self.held = self.held, ''
        return thought, said

    def drop_blanks(self):
        """Drop the blanks before the first word of the thoughts, or of the answer behind them."""
        if self.drops_blanks:
            self.held = self.held.lstrip()
            self.drops_blanks = not self.held
