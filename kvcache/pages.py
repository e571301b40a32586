"""
The pool of pages: in which slots the positions of each sequence lie. After vLLM's block manager (arXiv:2309.06180).
vLLM's blocks are called pages here, because a `Block` is a layer of the model. Settings and the server say blocks.

A sequence is a list of pages, its page table. Position p is in page table[p // page_size], at offset p % page_size.

References to pages are counted, so that sequences can share them: forks of one prompt, and prompts that begin alike.
For that, a full page is remembered by all tokens up to its end. It stays remembered after its last sequence ended,
until its space is needed. A sequence that writes to a shared page gets a copy of it first. No keys and values are
touched here.

If the model has a window, pages that no later token of a sequence sees are freed, and None is in their places in the
page table. A beginning is found again if all pages that the token after it sees are remembered.
"""
from collections import OrderedDict

from decode.batch import Runs


class Prefix:
    """
    The tokens of a full page and of all pages before it. Prefixes are equal if all their tokens are; equal hashes do
    not suffice.

    tokens: a tuple of page_size ids. parent: the Prefix of the page before. The one before the first page has none, and
    the salt in place of tokens.
    """
    __slots__ = ('parent', 'tokens', 'hash')

    def __init__(self, parent, tokens):
        self.parent, self.tokens, self.hash = parent, tokens, hash((parent and parent.hash, tokens))

    def __hash__(self):
        return self.hash

    def __eq__(self, other):
        a, b = self, other
        while a is not b:
            if a is None or b is None or a.tokens != b.tokens:
                return False
            a, b = a.parent, b.parent
        return True


class PagePool:
    """
    n_pages pages of page_size slots each. window, n_sink: of the model.

    It keeps of each sequence: n_computed, the number of positions whose keys and values are stored; table, its pages in
    order, including those for later positions, with None for pages that a window has passed; runs, its
    `decode.batch.Runs`; n_writable, the number of positions that need neither a new page nor a copy; prefixes, the
    `Prefix` of each of its first pages, as many as are known. It reads `tokens` of a sequence; `whole`: is token number
    p at position p?; and `salt`: only sequences with the same salt share pages (vLLM's cache_salt).

    references: the number of tables that each page is in. free_pages: those in no table; those that are remembered are
    used last. prefix_of: the `Prefix` of each full page that is remembered, or None. page_with: {Prefix: page}, the
    inverse. copies: (source, target, n) of slots, which the next call must copy first: the scheduler takes them.
    """

    def __init__(self, n_pages, page_size=16, window=0, n_sink=0):
        if min(n_pages, page_size) < 1:
            raise ValueError(f"a pool needs at least 1 page of at least 1 slot, not {n_pages} pages of {page_size}")
        self.n_pages, self.page_size, self.window, self.n_sink = n_pages, page_size, window, n_sink
        self.most_sequences, self.n_slots = n_pages, n_pages * page_size
        self.reset()

    def reset(self):
        """Forget all sequences and all that is remembered."""
        self.references, self.prefix_of = [0] * self.n_pages, [None] * self.n_pages
        self.free_pages, self.page_with, self.copies = OrderedDict.fromkeys(range(self.n_pages)), {}, []

    @property
    def n_free(self):
        """How many pages are in no table. Some may be remembered."""
        return len(self.free_pages)

    def begin(self, sequence, tokens=()):
        """
        Begin a sequence with the remembered pages of the beginning of these tokens. Returns how many tokens that
        beginning has. It fills whole pages and never has all tokens: the last one must be computed, for its logits.
        """
        table, prefixes = self.remembered(tokens, sequence.salt)
        for page in table:
            if page is not None:
                self.acquire(page)
        s = sequence
        s.table, s.prefixes = table, prefixes
        s.n_computed = len(table) * self.page_size
        self.write_runs(s)
        return s.n_computed

    def remembered(self, tokens, salt=''):
        """
        (page table, prefixes) of the longest remembered beginning of tokens that leaves one token to compute, or more.
        The table has the pages that the next token sees, and None in place of the others.
        """
        table, prefixes, prefix = [], [], Prefix(None, (salt,))
        for start in range(0, len(tokens) - self.page_size, self.page_size):
            prefix = Prefix(prefix, tuple(tokens[start:start + self.page_size]))
            page = self.page_with.get(prefix)
            if page is None and (not self.window or start < self.n_sink):
                break
            table.append(page)
            prefix = prefix if page is None else self.prefix_of[page]
            prefixes.append(prefix)
        while not self.complete(table, len(table) * self.page_size):
            table.pop()
        sinks, recent = self.seen(len(table) * self.page_size)
        table = [page if i in sinks or i in recent else None for i, page in enumerate(table)]
        return table, prefixes[:len(table)]

    def seen(self, n):
        """
        The numbers of the pages with earlier positions that the token at position n sees: a range for pages with sinks,
        and a range for the others.
        """
        size = self.page_size
        n_first = -(-min(self.n_sink, n) // size)
        first = max(self.n_sink, n - self.window + 1) if self.window else 0
        return range(n_first), range(max(n_first, first // size), -(-n // size))

    def complete(self, table, n):
        """Does a table have all pages with earlier positions that the token at position n sees?"""
        return not self.window or all(table[i] is not None for numbers in self.seen(n) for i in numbers)

    def extend(self, sequence, n):
        """
        Slots for n more positions of a sequence. Pages that its next token does not see are freed first. If its last
        page is shared, it is replaced by a copy. Returns whether there were enough pages; if not, nothing has changed.
        """
        s, size = sequence, self.page_size
        if s.n_computed + n <= s.n_writable:
            return True
        last, n_new = s.n_computed // size, max(0, -(-(s.n_computed + n) // size) - len(s.table))
        shared = last < len(s.table) and self.references[s.table[last]] > 1
        passed = self.passed(s)
        if n_new + shared - sum(self.references[s.table[i]] == 1 for i in passed) > self.n_free:
            return False
        for i in passed:
            self.release(s.table[i])
            s.table[i] = None
        if shared:
            source, s.table[last] = s.table[last], self.acquire()
            self.copies.append((source * size, s.table[last] * size, s.n_computed % size))
            self.release(source)
        elif last < len(s.table):
            self.forget(s.table[last])  # a full page that was cut will be written again
        n_before = len(s.table)
        s.table += [self.acquire() for _ in range(n_new)]
        self.write_runs(s, None if shared or passed else n_before)
        return True

    def will_grow(self, sequence):
        """Will a sequence need another page, if it goes on to its end?"""
        return min(sequence.n_end - 1, sequence.max_positions) > len(sequence.table) * self.page_size

    def passed(self, sequence):
        """The numbers of the pages of a sequence that its next token does not see, in descending order."""
        if not self.window:
            return []
        table, (sinks, recent), numbers = sequence.table, self.seen(sequence.n_computed), []
        own = sequence.n_computed // self.page_size  # the page of the next token: it and all after it stay
        for i in range(min(len(table), recent.start, own) - 1, sinks.stop - 1, -1):
            if table[i] is None:  # and so are all before it
                break
            numbers.append(i)
        return numbers

    def write_runs(self, sequence, first=None):
        """Add the pages of a sequence from number `first` on to its runs. None: write all of its runs anew."""
        s, size = sequence, self.page_size
        if first is None:
            s.runs, last = Runs(), len(s.table)
            while last and s.table[last - 1] is not None:  # the pages that a window has passed are many, and skipped
                last -= 1
            numbers = [*range(min(last, -(-self.n_sink // size))), *range(last, len(s.table))]
        else:
            numbers = range(first, len(s.table))
        for i in numbers:
            s.runs.append(i * size, s.table[i] * size, size)
        s.n_writable = len(s.table) * size

    def computed(self, sequence, n):
        """n more positions of a sequence are stored. Its full pages are remembered by its tokens."""
        s, size = sequence, self.page_size
        s.n_computed += n
        if not s.whole:
            return
        for i in range(len(s.prefixes), s.n_computed // size):
            page, parent = s.table[i], s.prefixes[-1] if i else Prefix(None, (s.salt,))
            mine = Prefix(parent, tuple(s.tokens[i * size:(i + 1) * size]))
            if mine in self.page_with:  # two sequences have computed the same; one page of them is remembered
                mine = self.prefix_of[self.page_with[mine]]
            else:
                self.prefix_of[page], self.page_with[mine] = mine, page
            s.prefixes.append(mine)

    def fork(self, sequence, new):
        """Give a new sequence all positions of another one, in the same pages."""
        s = sequence
        new.table = s.table[:-(-s.n_computed // self.page_size)]  # not what it has for later positions
        for page in new.table:
            if page is not None:
                self.acquire(page)
        new.n_computed, new.prefixes = s.n_computed, s.prefixes[:]
        self.write_runs(new)
        s.n_writable = new.n_writable = s.n_computed  # the last page is shared now

    def cut(self, sequence, n):
        """
        Keep the first n positions of a sequence, and no slots of later ones. If the window has passed a page that the
        next token would see, nothing is kept. Returns how many positions are kept.
        """
        s = sequence
        n = n if n == 0 or self.complete(s.table, n) else 0
        n_kept = -(-n // self.page_size)
        for page in reversed(s.table[n_kept:]):
            if page is not None:
                self.release(page)
        del s.table[n_kept:], s.prefixes[n // self.page_size:]
        s.n_computed = n
        self.write_runs(s)
        s.n_writable = n  # the last page may be remembered as a full one
        return n

    def free(self, sequence):
        """Free all pages of a sequence."""
        self.cut(sequence, 0)

    def acquire(self, page=None):
        """Count one more reference to a page. None takes the first of the free ones, and forgets its content."""
        if page is None:
            page, _ = self.free_pages.popitem(last=False)
            self.forget(page)
        else:
            self.free_pages.pop(page, None)
        self.references[page] += 1
        return page

    def release(self, page):
        """Count one reference less. A page without any is free: used last if it is remembered, else first."""
        self.references[page] -= 1
        if self.references[page] == 0:
            self.free_pages[page] = None
            self.free_pages.move_to_end(page, last=self.prefix_of[page] is not None)

    def forget(self, page):
        """Do not remember the content of a page any more."""
        prefix, self.prefix_of[page] = self.prefix_of[page], None
        if prefix is not None:
            del self.page_with[prefix]


def pages_for(config, page_size):
    """The largest number of pages that a sequence of a model needs, and one without end if the model has a window."""
    if not config.window:
        return -(-config.block_size // page_size)
    # a chunk of window + 1 tokens and the window - 1 before it, which begin anywhere in a page
    n = -(-config.n_sink // page_size) + (2 * config.window - 2) // page_size + 2
    return min(n, -(-config.max_positions // page_size)) if config.position == 'learned' else n
