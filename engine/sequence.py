"""A sequence: a list of tokens that is being continued. They are the only record of it."""

MOST_AHEAD = 64     # tokens that a sequence draws in a call
AHEAD_OF_STOPS = 8  # the same where a stop string may come: tokens after it are given up


class Sequence:
    """
    When a full context (max_positions tokens) gets another token, it is cut to its first n_keep and its last `keep`
    tokens. With keep = max_positions the context moves by one token, as in nanoGPT.
    """

    def __init__(self, prompt, settings, max_new_tokens, max_positions, n_keep=0, keep=None, salt='',
                 prompt_logits=False, logprobs=False, most_ahead=MOST_AHEAD, logits_from=0):
        self.tokens, self.n_prompt = list(prompt), len(prompt)  # of the prompt, and those that were drawn
        self.n_end = self.n_prompt + max_new_tokens  # the number of tokens with which it ends
        self.settings = settings  # its `decode.draw.DrawSettings`
        self.ended = self.error = None  # why it does not go on: 'stop', 'length', 'abort', or 'error' and the exception
        self.max_positions, self.n_keep = max_positions, n_keep
        self.keep = max_positions if keep is None else keep
        self.salt = salt              # of the pages that it may share
        # are the logits of the prompt's tokens wanted, from this number on? They are computed then, even if remembered
        self.prompt_logits, self.logits_from = prompt_logits, logits_from
        self.logprobs = logprobs      # are the logits wanted from which its tokens are drawn?
        self.most_ahead = most_ahead  # tokens that it draws in a call, at most
        self.siblings = []            # of the same prompt, which begin as forks when all but its last token is computed
        self.rank = ()                # the order of arrival; the scheduler prefers the lowest
        self.n_failed = 0             # calls of it that have failed
        self.n_found = None           # how many tokens of the prompt the pool remembered when it first ran
        self.constraint = None        # what says which tokens may come next, a `serving.constraints.Constraint`
        self.owner = None             # whom its text is for; others set it, and the engine does not look at it
        self.forget()

    def forget(self):
        """Nothing of it is computed, and the pool does not know it."""
        self.n_computed = 0  # positions of its context whose keys and values the pool has
        self.table, self.cells, self.runs, self.n_writable, self.prefixes = [], None, None, 0, []  # see `PagePool`

    def __lt__(self, other):
        return self.rank < other.rank

    @property
    def n_drawn(self):
        """How many tokens were drawn."""
        return len(self.tokens) - self.n_prompt

    @property
    def whole(self):
        """Is its context all of its tokens, so that token number p is at position p?"""
        return len(self.tokens) <= self.max_positions

    @property
    def length(self):
        """
        How many tokens the context has. A full one is cut to n_keep + keep tokens when the next token comes, grows
        until it is full, and is cut again.
        """
        n, most = len(self.tokens), self.max_positions
        if n <= most:
            return n
        n_full = max(most, self.n_prompt)  # so many tokens make the first context that is full
        if n <= n_full:
            return most
        n_kept = self.n_keep + self.keep
        return n_kept + (n - n_full - 1) % (most - n_kept + 1)

    def uncomputed(self, n):
        """The next n tokens of the context, a list."""
        start = self.n_computed
        if self.whole:
            return self.tokens[start:start + n]
        first = self.tokens[start:self.n_keep]
        behind = len(self.tokens) - self.length  # position p is token number p + behind
        start = max(start, self.n_keep) + behind
        return (first + self.tokens[start:start + n - len(first)])[:n]

    def most_steps(self):
        """The most tokens that can be drawn before the context is cut or the allowed tokens change."""
        return 1 if self.constraint else min(self.n_end - len(self.tokens), self.max_positions - self.length + 1)

    def extend(self, new):
        """Add tokens that were drawn. The last one may end it."""
        self.tokens += new
        if new and new[-1] in self.settings.stop_ids:
            self.ended = 'stop'
        elif new and len(self.tokens) >= self.n_end:
            self.ended = 'length'
