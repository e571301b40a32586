"""
Thoughts: what a model writes between <think> and </think> before its answer, as Qwen3, SmolLM3, DeepSeek-R1 and others
do. Their chat templates leave the thoughts of earlier answers out of a prompt.
"""
from chat.tools import certain

OPENS, CLOSES = '<think>', '</think>'


def thinks(template):
    """Does a `ChatTemplate` know thoughts?"""
    return CLOSES in template.source


def opens_thoughts(prompt, token_bytes):
    """Does a prompt, token ids, end with OPENS? token_bytes: those of each id."""
    return b''.join(token_bytes[token] for token in prompt[-16:]).rstrip().endswith(OPENS.encode())


class ThoughtReader:
    """
    Parts what a model writes into thoughts, which come first if there are any, and its answer. opened: does the prompt
    end with OPENS?

    state: BEGINS, until it is known whether there are thoughts; THINKS; ANSWERS. n_tokens: how many tokens were written
    so far up to the end of the thoughts, 0 without thoughts.
    """
    BEGINS, THINKS, ANSWERS = range(3)

    def __init__(self, opened):
        self.state, self.held, self.drops_blanks = self.THINKS if opened else self.BEGINS, '', opened
        self.n_tokens, self.tokens, self.end = 0, [], b''  # tokens: not counted yet; end: bytes before them

    def push(self, piece, tokens=(), last=False):
        """
        What is certain now: (more thoughts, more of the answer), two texts. Blanks at both ends of the thoughts are
        dropped. tokens: the bytes of each token that came with the piece. last: is this the last piece?
        """
        thought = said = ''
        self.hold(self.held + piece)
        if self.state == self.BEGINS:
            text = self.held.lstrip()
            if text.startswith(OPENS):
                self.enter(self.THINKS, text[len(OPENS):])
            elif last or not OPENS.startswith(text):
                self.state = self.ANSWERS
        if self.state != self.ANSWERS:
            self.tokens += tokens
        if self.state == self.THINKS:
            self.count()
            thought, closed, rest = self.held.partition(CLOSES)
            thought = thought.rstrip() if closed or last else certain(thought, CLOSES)
            self.held = self.held[len(thought):]
            if closed:
                self.enter(self.ANSWERS, rest)
        if self.state == self.ANSWERS:
            said, self.held = self.held, ''
        return thought, said

    def enter(self, state, text):
        self.state, self.drops_blanks = state, True
        self.hold(text)

    def hold(self, text):
        self.held = text.lstrip() if self.drops_blanks else text
        self.drops_blanks &= not self.held

    def count(self):
        for token in self.tokens:
            if CLOSES.encode() not in self.end:
                self.n_tokens, self.end = self.n_tokens + 1, self.end[-len(CLOSES):] + token
        self.tokens = []
