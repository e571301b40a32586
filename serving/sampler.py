"""The next token of each sample of a step, by one compiled call for all rows."""
import numpy as np

from decode.kernel import sampling as table
from decode.kernel.sampling import DRAW, N_SCRATCH, log_probabilities
from decode.kernel.threads import LINE, aligned, n_cores
from decode.metadata import NextTokens
from serving.request import Logprobs

# settings that are numbers, in the order of the columns of kernel/sampling.py
SETTINGS = ('temperature', 'top_k', 'top_p', 'min_p', 'presence_penalty', 'frequency_penalty', 'repetition_penalty')


class Drawing:
    """
    How one sample draws: its settings, its seed, and what changes its logits before.

    n_generated: how many tokens it has drawn. stops: the tokens that end it, ascending, which are not drawn before
    min_tokens. counts: how often each token was drawn, int64 (vocab_size,), and in_prompt: 1 for those of the prompt,
    uint8; both None without penalties. bias_tokens, biases: int64 and float64 (n,). changes: what is done to its
    logits, N_CHANGES numbers, see kernel/sampling.py, with the addresses of these arrays, which a copy shares.
    """
    __slots__ = ('settings', 'seed', 'n_generated', 'stops', 'min_tokens', 'counts', 'in_prompt', 'bias_tokens',
                 'biases', 'changes')

    def __init__(self, request, index, stop_ids, vocab_size):
        p = request.params
        settings = {name: getattr(p, name) for name in SETTINGS} | {'top_k': min(max(p.top_k, 0), vocab_size)}
        self.settings, self.seed, self.n_generated = tuple(settings.values()), (request.seed + index) % 2**64, 0
        self.stops, self.min_tokens = sorted(stop_ids), p.min_tokens if stop_ids else 0
        self.counts = self.in_prompt = None
        self.bias_tokens = np.array([*p.logit_bias.keys()], np.int64)
        self.biases = np.array([*p.logit_bias.values()], np.float64)
        of_penalties = 0, 0
        if p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1:
            self.counts, self.in_prompt = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.uint8)
            self.in_prompt[request.prompt] = 1
            of_penalties = self.counts.ctypes.data, self.in_prompt.ctypes.data
        self.changes = (*of_penalties, len(self.biases), self.bias_tokens.ctypes.data, self.biases.ctypes.data,
                        self.min_tokens)

    def restore(self, tokens):
        """Set `n_generated` and `counts` to what they are after these tokens were drawn."""
        self.n_generated = len(tokens)
        if self.counts is not None:
            self.counts[:] = np.bincount(np.array(tokens, np.int64), minlength=len(self.counts))


class Sampler:
    """
    Draws the next token of each sample. Logits are float32 (W, vocab_size); each sample draws from one of the W rows.

    stop_soon: int64. Any thread may set stop_soon[0] to 1. The present step is then the last one of `several`.
    """

    def __init__(self, vocab_size):
        self.vocab_size, self.scratch = vocab_size, np.empty((n_cores(), N_SCRATCH, vocab_size))
        self.stop_soon = aligned(LINE, np.int64)
        self.rows = self.drawings = None  # of the table
        self.uncounted = False  # has the table counted tokens that were not noted by `drawn_by`?
        self.draw(np.zeros((1, vocab_size), np.float32), [], [])  # compiles, or loads what is compiled
        self.logprobs(np.zeros((1, vocab_size), np.float32), [0], 1)

    def draw(self, logits, rows, drawings):
        """The token that each `Drawing` draws from its row of the logits, a list. Their `n_generated` grows."""
        self.describe(rows, drawings)
        logits, tokens = np.ascontiguousarray(logits), np.empty(len(drawings), np.int64)
        DRAW.call(self.table.ctypes.data, logits.ctypes.data, tokens.ctypes.data, 0, 1)
        for d in drawings:
            d.n_generated += 1
        return tokens.tolist()

    def several(self, n_steps, until, newest, rows, drawings, limits=None, texts=None):
        """
        `NextTokens` for up to n_steps steps in which each `Drawing` draws from its row of the logits. newest: the last
        token of each. until: when the last step may begin, in nanoseconds of `threads.nanoseconds`. limits, texts: how
        many tokens each may draw, and the texts, see there. When the steps are done, the caller gives the result to
        `drawn_by`. After a failure it restores each `Drawing` instead.
        """
        if self.uncounted or (rows, drawings) != (self.rows, self.drawings):
            self.describe(rows, drawings)
        self.uncounted = True
        tokens = np.empty((n_steps + 1, len(newest)), np.int64)
        tokens[0], self.table[table.UNTIL] = newest, until
        return NextTokens(DRAW, self.table, tokens, self.arrays, drawings, self.stop_soon, until, limits, texts)

    def drawn_by(self, next_tokens):
        """Note the tokens that the steps of `several` have drawn. Returns a list of them for each `Drawing`."""
        drawn, self.uncounted = next_tokens.tokens[1:next_tokens.n_drawn + 1].T.tolist(), False
        for d, tokens, n in zip(self.drawings, drawn, next_tokens.counts):
            d.n_generated += n
            del tokens[n:]
        return drawn

    def describe(self, rows, drawings):
        """Write the table of these drawings; it has the addresses of arrays that are attributes here."""
        if drawings != self.drawings:
            starts, stops = [0], []
            for d in drawings:
                stops += d.stops
                starts.append(len(stops))
            self.arrays = {
                table.SETTINGS: np.array([d.settings for d in drawings], np.float64),
                table.SEEDS: np.array([d.seed for d in drawings], np.uint64),
                table.CHANGES: np.array([d.changes for d in drawings], np.int64),
                table.STOP_STARTS: np.array(starts, np.int64), table.STOPS: np.array(stops, np.int64),
                table.SCRATCH: self.scratch, table.STOP_SOON: self.stop_soon}
        self.arrays = self.arrays | {  # not in place: `NextTokens` may keep those of before
            table.NUMBERS: np.array([d.n_generated for d in drawings], np.int64),
            table.ROWS: np.array(rows, np.int64)}
        self.table = table.table_of(self.vocab_size, self.arrays)
        self.rows, self.drawings, self.uncounted = rows, drawings, False

    def logprobs(self, logits, tokens, k):
        """A `Logprobs` with the k likeliest tokens for each row of logits (W, vocab_size) and its token."""
        n = len(tokens)
        logprobs, ranks = np.empty(n), np.empty(n, np.int64)
        top = np.zeros((n, min(k, logits.shape[1])), np.int64)
        top_logprobs = np.empty(top.shape)
        log_probabilities(logits, np.array(tokens, np.int64), self.scratch[0], logprobs, ranks, top, top_logprobs)
        of_rows = zip(tokens, logprobs.tolist(), ranks.tolist(), top.tolist(), top_logprobs.tolist())
        return [Logprobs(token, logprob, rank, list(zip(*likeliest))) for token, logprob, rank, *likeliest in of_rows]
