"""A sequence: a list of tokens that is being continued. They are the only record of it."""

MOST_AHEAD = 64     # tokens that a sequence draws in a call
AHEAD_OF_STOPS = 8  # the same where a stop string may come: tokens after it are given up


class Sequence:
    """
    tokens: of the prompt, and those that were drawn, a list. n_prompt: the length of the prompt. n_end: the number of
        tokens with which it ends.
    settings: its `decode.draw.DrawSettings`. ended: None while it goes on, then why not: 'stop', 'length', 'abort' or
        'error'; error: the exception.

    n_computed: the number of positions of its context whose keys and values the pool has. What else the pool keeps of
        it: table (or cells), runs, n_writable, prefixes; see `kvcache.pages.PagePool`. n_found: how many tokens
        of the prompt the pool remembered when the sequence first ran, None before.

    max_positions, n_keep, keep: when a full context (max_positions tokens) gets another one, it is cut to its first
        n_keep and its last `keep` tokens. With keep = max_positions the context moves by one token, as in nanoGPT.
    most_ahead: how many tokens it draws in a call at most. salt: of the pages that it may share.
    prompt_logits: are the logits of the prompt's tokens wanted, from number logits_from on? These tokens are computed
        then, whatever is remembered. logprobs: are the logits wanted from which its tokens are drawn?
    siblings: sequences with the same prompt, which begin as forks of this one when all but its last token is computed.
    rank: the order of arrival; the scheduler prefers the lowest. n_failed: how many calls of it have failed.
    constraint: None, or what says which tokens may come next, see `serving.constraints.Constraint`. It follows the
        tokens that were drawn.
    owner: whom its text is for; others set it, and the engine does not look at it.
    """

    def __init__(self, prompt, settings, max_new_tokens, max_positions, n_keep=0, keep=None, salt='',
                 prompt_logits=False, logprobs=False, most_ahead=MOST_AHEAD, logits_from=0):
        self.tokens, self.n_prompt, self.settings = list(prompt), len(prompt), settings
        self.n_end, self.ended, self.error = self.n_prompt + max_new_tokens, None, None
        self.max_positions, self.n_keep = max_positions, n_keep
        self.keep = max_positions if keep is None else keep
        self.salt, self.prompt_logits, self.logprobs, self.most_ahead = salt, prompt_logits, logprobs, most_ahead
        self.logits_from = logits_from
        self.siblings, self.rank, self.n_failed, self.n_found, self.owner, self.constraint = [], (), 0, None, None, None
        self.forget()

    def forget(self):
        """Nothing of it is computed, and the pool does not know it."""
        self.n_computed, self.table, self.cells, self.runs, self.n_writable, self.prefixes = 0, [], None, None, 0, []

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
