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


def parted(text, last):
    """(thoughts, answer) of what a model has written so far, as far as they are certain. last: is it the whole?"""
    begun = text.lstrip()
    if not begun.startswith(OPENS):
        return '', text if last or not OPENS.startswith(begun) else ''
    thought, closed, answer = begun.removeprefix(OPENS).lstrip().partition(CLOSES)
    return thought.rstrip() if closed or last else certain(thought, CLOSES), answer.lstrip()


class ThoughtReader:
    """
    Parts what a model writes into thoughts, which come first if there are any, and its answer. opened: does the prompt
    end with OPENS? Then the text is read as if it began with it.
    """

    def __init__(self, opened):
        self.text, self.n_thought, self.n_answer = OPENS * opened, 0, 0  # characters that were returned
        self.n_taken, self.tail = 0, b''  # tokens up to the end of thoughts, if there are any, and their last bytes

    @property
    def n_tokens(self):
        """How many tokens so far are of the thoughts and their tags."""
        return self.n_taken if self.text.lstrip().startswith(OPENS) else 0

    def push(self, piece, tokens=(), last=False):
        """
        What is certain now: (more thoughts, more of the answer), two texts. Blanks at both ends of the thoughts are
        dropped. tokens: the bytes of each token that came with the piece. last: is this the last piece?
        """
        if self.n_answer:  # nothing of the answer is held
            return '', piece
        for token in tokens:
            if CLOSES.encode() not in self.tail:
                self.n_taken, self.tail = self.n_taken + 1, self.tail[-len(CLOSES):] + token
        self.text += piece
        thought, answer = parted(self.text, last)
        more = thought[self.n_thought:], answer[self.n_answer:]
        self.n_thought, self.n_answer = len(thought), len(answer)
        return more
