"""
The engine: one loop. The scheduler says which tokens of which sequences come next, the pool gives them slots, the
executor computes and draws, the sequences get their tokens.

    engine = Engine(model)
    for number, tokens in engine.stream([[1, 2, 3], [4]], 100, temperature=0.8):    # tokens of a prompt, as they come
        ...

An engine is called by one thread at a time: a call that finds another one running is a ValueError.
"""
import os
import sys
import weakref

import numpy as np

from decode.batch import Refused, SequenceOutput, now
from decode.draw import DrawSettings
from decode.eager import EagerExecutor
from engine.scheduler import Scheduler
from engine.sequence import MOST_AHEAD, Sequence
from kvcache import PagePool, bytes_of_slots, make_layers, pages_for

LONGEST_CALL = 0.04  # seconds, of several steps
LONGEST_MASKED = 0.0005  # likewise, while a sequence waits to be told which tokens are allowed next
PAGE_SIZE = 16
N_PAGES, POOL_BYTES = 1024, 2**30  # of a pool, by default; bytes of keys and values


class Engine:
    """
    model: a GPT in eval mode. executor: of the model, see `decode.best`; by default the one in PyTorch. pool: of
    `kvcache`; by default one of pages with 2**30 bytes at most. budget: the most tokens of a step: more of them read a
    prompt sooner, and let the other sequences wait longer. most_running: the most sequences that have slots. kv_bits: 0
    stores keys and values as the executor computes them, 8 rounds them. ValueError if these do not go together.

    A sequence has the same tokens and logits as when it runs alone, with a compiled executor bit for bit: other
    sequences, remembered pages and preemption do not change them. Tokens are the only record. All keys and values are
    computed again after an exception inside of a call (but not `Refused`), after an interrupt, and when the first call
    after an `add` finds that weights have changed.

    longest_call: seconds that a call of several steps takes at most. return_soon: another thread may set return_soon[0]
    to 1; then the present call returns soon, and so does each later one until it is set back to 0.
    """

    def __init__(self, model, executor=None, pool=None, budget=2048, most_running=2**30, kv_bits=0):
        if kv_bits not in (0, 8):
            raise ValueError(f"kv_bits must be 0 or 8, not {kv_bits!r}")
        executor = executor or EagerExecutor(model)
        if executor.model is not model:
            raise ValueError("the executor computes another model than the one given as model: give both the same one")
        type_kv = f'int{kv_bits}' if kv_bits else executor.type_kv
        self.model, self.executor = model, executor
        self.pool = pool or default_pool(model.config, type_kv=type_kv)
        self.pool.reset()
        self.pool.engine = weakref.ref(self)
        executor.hold(make_layers(model, self.pool.n_slots, type_kv))
        # executors and drafts hold this list too: it is emptied with the engine, which frees the keys and values
        weakref.finalize(self, executor.layers.clear).atexit = False
        self.layers = executor.layers
        self.scheduler = Scheduler(self.pool, budget, min(most_running, getattr(executor, 'most_sequences', 2**30)))
        self.longest_call, self.return_soon = LONGEST_CALL, np.zeros(8, np.int64)  # a cache line: a thread sets it
        self.tables, self.pid = tables_of(model), os.getpid()
        self.state, self.slot_settings = state_of(model, self.tables), slot_settings(model.config)
        self.is_running = self.unfinished = self.has_added = False  # has_added: sequences, since the last call
        self.over, self.late = [], []  # sequences that have ended without a call; what is to end after the present one
        self.n_steps = self.n_computed = 0  # steps of the model, and tokens whose keys and values they have computed

    def add(self, prompt, max_new_tokens, n=1, seed=0, stop_ids=(), min_tokens=0, logit_bias=(), salt='',
            prompt_logits=False, logprobs=False, most_ahead=MOST_AHEAD, constraint=None, when_full=None, keep=None,
            n_keep=0, logits_from=0, **values):
        """
        Begin n sequences that continue a prompt, a list of token ids. Returns them. Number i draws with seed + i.

        stop_ids, min_tokens, logit_bias, values: see `decode.draw.DrawSettings`; salt, prompt_logits, logits_from,
        logprobs, most_ahead: see `Sequence`. constraint: None, or what says which tokens may come next, of which each
        sequence gets its own. when_full: what becomes of a context of block_size tokens that gets another one.
            'crop': the last block_size tokens, as in nanoGPT. Each token then costs a full pass.
            'shift': the first n_keep tokens of the prompt and the last `keep`, by default half of block_size; they are
            computed again at their new positions, which makes room for more tokens at one step each.
            None: 'crop'. A model with a window and without learned positions has no full context, and takes None only.
        ValueError if the prompt or the settings make no sense, or do not fit the model or the pool.
        """
        self.check_caller()
        c = self.model.config
        prompt = token_list(prompt, c.vocab_size)
        if type(salt) is not str:
            raise ValueError(f"salt must be a text, not {salt!r}")
        for name, count, least in (('max_new_tokens', max_new_tokens, 0), ('n', n, 1), ('n_keep', n_keep, 0),
                                   ('keep', 1 if keep is None else keep, 1), ('logits_from', logits_from, 0),
                                   ('most_ahead', most_ahead, 1), ('min_tokens', min_tokens, 0)):
            if type(count) is not int or count < least:
                raise ValueError(f"{name} must be an integer from {least} on, not {count!r}")
        n_keep, keep = context_of(c, when_full, keep, n_keep, len(prompt))
        if prompt_logits and len(prompt) > c.max_positions:
            raise ValueError(f"prompt_logits=True is for a prompt of at most {c.max_positions} tokens, not "
                             f"{len(prompt)}")
        self.check_room(prompt, max_new_tokens)
        if any(self.state['hooks']):  # by now they may do something else than when a prompt was remembered
            salt = f'{self.scheduler.n_added} {salt}'
        settings = DrawSettings(c.vocab_size, seed, stop_ids, min_tokens, logit_bias, prompt, **values)
        sequences = [
            Sequence(prompt, settings.with_seed(seed + i) if i else settings, max_new_tokens, c.max_positions, n_keep,
                     keep, salt, prompt_logits and not i, logprobs, most_ahead, logits_from)
            for i in range(n)]
        for s in sequences if constraint else ():
            s.constraint = constraint.for_sample(s.settings.stop_ids, settings.min_tokens)
            s.settings.allowed = s.constraint.allowed
        if max_new_tokens == 0 and not (prompt_logits and len(prompt) > 1):  # nothing of them is to be computed
            for s in sequences:
                s.ended = 'length'
            self.over += sequences
        else:
            self.scheduler.add(sequences)
            self.has_added = True
        return sequences

    def check_room(self, prompt, max_new_tokens):
        """ValueError if a sequence can never fit into the pool."""
        c, page_size = self.model.config, self.pool.page_size
        n_tokens = min(len(prompt) + max(0, max_new_tokens - 1), c.max_positions)  # the last one is not computed
        n_pages = min(-(-n_tokens // page_size), pages_for(c, page_size))
        if n_pages > self.pool.n_pages:
            raise ValueError(f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones take {n_pages} pages of "
                             f"{page_size} slots, and the pool has {self.pool.n_pages}: ask for fewer, or make a "
                             "larger pool")

    def step(self):
        """
        One call of the executor: a step of the model, in which each sequence gets a token or a chunk of its prompt is
        computed, or several steps that follow each other. Returns [(sequence, its `decode.batch.SequenceOutput`)]; a
        sequence that has ended says why.
        """
        self.check_caller()
        self.is_running = True
        try:
            if self.has_added:
                self.notice_changes()
            if self.unfinished:  # an exception has ended the call or the reset before, at any place
                self.reset()
            self.unfinished = True
            self.constrain()
            if self.over:
                results, self.over = [(s, SequenceOutput([])) for s in self.over], []
            else:
                waits = any([s.constraint for s in self.scheduler.running])
                longest = min(self.longest_call, LONGEST_MASKED) if waits else self.longest_call
                batch = self.scheduler.next(now() + int(1e9 * longest), self.return_soon)
                results = self.run(batch) if batch else []
            self.unfinished = False
            return results
        finally:
            self.is_running = False
            while self.late:
                self.end(*self.late.pop())

    def run(self, batch):
        """What `step` returns of a batch."""
        try:
            outputs = self.executor.execute_model(batch)
        except Exception as error:
            return self.recover(batch, error)
        results, self.n_steps = [], self.n_steps + max(1, *[len(output.tokens) for output in outputs])
        for s, count, output in zip(batch.sequences, batch.counts, outputs):
            output.first = s.n_computed
            s.extend(output.tokens)
            n = count + max(0, len(output.tokens) - 1)  # the token that was drawn last is not computed yet
            self.pool.computed(s, n)
            self.n_computed += n
            if len(s.tokens) == s.n_end and s.n_computed >= s.length - 1:
                s.ended = s.ended or 'length'  # of a prompt that is only to be computed
            if s.ended:
                self.scheduler.remove(s)
            elif output.tokens:
                self.scheduler.settle(s)
            results.append((s, output))
        return results

    def constrain(self):
        """
        Let constraints follow what was drawn, and have them write which tokens may come next, side by side. A sequence
        ends where no token may follow, or where its constraint has failed.
        """
        # only those that run have drawn; after a `reset` all wait
        behind = [s for s in self.scheduler.running or self.scheduler.going
                  if s.constraint and s.constraint.n_taken != s.n_drawn]
        for s in behind:
            try:
                s.constraint.take(s.tokens[s.n_prompt:])
            except Exception as error:
                s.error = error
        if going := [s.constraint for s in behind if not s.error]:
            going[0].write(going)
        for s in behind:
            if s.error or s.constraint.is_complete:
                s.error = s.error or s.constraint.error
                s.ended = 'error' if s.error else 'stop'
                self.scheduler.remove(s)
                self.over.append(s)

    def recover(self, batch, error):
        """
        A call has failed. Its sequences are tried again in halves, then one by one; one that fails alone ends with its
        error. Returns what `step` returns of it.
        """
        suspects = batch.sequences
        print(f"a call of {len(suspects)} sequences failed: {error!r}", file=sys.stderr)
        if not isinstance(error, Refused):  # it may have written
            self.reset()
        for s in self.scheduler.running[:]:  # after a `Refused`: its copies may not have been made
            self.scheduler.preempt(s)
        if len(suspects) == 1:
            s = suspects[0]
            s.ended, s.error = 'error', error
            self.scheduler.remove(s)
            return [(s, SequenceOutput([]))]
        for s in suspects:
            s.n_failed += 1
        n = 1 if max(s.n_failed for s in suspects) > 1 else -(-len(suspects) // 2)
        self.scheduler.suspects[:1] = [suspects[i:i + n] for i in range(0, len(suspects), n)]  # in place of the first
        return []

    def reset(self):
        """Forget all keys and values. Slots become zeros, because a mask adds to scores and hides no infinite key."""
        self.unfinished = True
        self.pool.reset()
        for layer in self.executor.layers:
            layer.zero()
        self.scheduler.wait_again()

    @property
    def is_idle(self):
        """Is there nothing to do for `step`?"""
        return not (self.over or self.scheduler.running or self.scheduler.waiting)

    def end(self, sequence, reason, n_tokens=None):
        """End a sequence that goes on, after its first n_tokens. Its slots are free once no call is under way."""
        if self.is_running:  # Python collects a generator of `stream` at any time
            self.late.append((sequence, reason, n_tokens))
            return
        if n_tokens is not None:
            del sequence.tokens[n_tokens:]
        if not sequence.ended:
            sequence.ended = reason
            self.scheduler.remove(sequence)

    def notice_changes(self):
        """Let the executor read the model anew if it has changed; then all keys and values are computed again."""
        if changed := dict(slot_settings(self.model.config).items() - self.slot_settings.items()):
            raise ValueError(f"{', '.join(f'{name} is {value} now' for name, value in changed.items())}, but the slots "
                             "are for the model as it was: make a new engine")
        if state_of(self.model, self.tables) != self.state:
            self.state = {'hooks': ()}  # after an interrupt the next call refreshes again
            self.tables = tables_of(self.model)
            state = state_of(self.model, self.tables)
            self.executor.refresh()
            self.unfinished = True  # so that the step forgets keys and values, after an interrupt too
            self.state = state
        self.has_added = False

    def check_caller(self):
        """
        ValueError in the child of a fork, inside of a call, and if a later engine has the executor or the pool.
        """
        for name, is_taken in (('executor', self.executor.layers is not self.layers),
                               ('pool', self.pool.engine() is not self)):
            if is_taken:
                raise ValueError(f"a later engine has taken the {name} of this one, or this one is a copy, and each "
                                 f"engine needs its own: make another {name}")
        if self.pid != os.getpid():
            raise ValueError("this engine was made before a fork, in another process: make an engine in this process")
        if self.is_running:
            raise ValueError("this engine is in a call, and one thread at a time may call it: wait until that call "
                             "returns, or make another engine")

    def stream(self, prompts, max_new_tokens, n=1, seed=0, **settings):
        """
        Continue prompts, lists of token ids. Yields (number, tokens) as tokens come: sample i of prompt p is number
        p * n + i, and draws with seed + number. settings: of `add`. What a caller does not take is not computed.
        """
        going = []
        try:
            for p, prompt in enumerate(prompts):
                first = seed + p * n if p else seed  # `add` refuses a seed that is no number
                going += self.add(prompt, max_new_tokens, n, first, **settings)
            given = [s.n_prompt for s in going]  # how many tokens of each the caller has
            while True:
                # a step may give tokens to other streams too, and theirs may give some, or an error, to this one
                news = [(number, s) for number, s in enumerate(going) if s.error or len(s.tokens) > given[number]]
                for number, s in news:
                    if s.error:
                        raise s.error
                    new, given[number] = s.tokens[given[number]:], len(s.tokens)
                    yield number, new
                if not news:
                    if all([s.ended for s in going]):
                        return
                    self.step()
        finally:
            self.over = [s for s in self.over if s not in going]
            for s in going:
                self.end(s, 'abort')

    def generate(self, prompts, max_new_tokens, n=1, seed=0, **settings):
        """`stream`, collected: for each sample a list of its prompt and its new tokens, up to what has ended it."""
        prompts = [*prompts]
        drawn = [[] for _ in range(n * len(prompts))]
        with self.executor.torch_on_one_thread():
            for number, tokens in self.stream(prompts, max_new_tokens, n, seed, **settings):
                drawn[number] += tokens
        return [np.array(prompts[number // n]).tolist() + tokens for number, tokens in enumerate(drawn)]


def slot_settings(config):
    """The settings that slots and pages are made for."""
    return {name: getattr(config, name) for name in ('n_layer', 'n_kv_head', 'head_dim', 'window', 'n_sink')}


def tables_of(model):
    """The modules of a model, and the dicts in which they keep what `state_of` reads: finding these is slow."""
    modules = [*model.modules()]
    return (modules, [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)],
            [m._modules for m in modules], [m._parameters for m in modules if m._parameters])


def state_of(model, tables):
    """What changes with a model: settings, classes, hooks, parts, and of each weight the address and `version`."""
    modules, hooks, parts, weights = tables
    return dict(config=vars(model.config).copy(), classes=[*map(type, modules)], hooks=[*map(len, hooks)],
                parts=[part for table in parts for part in table.values()],
                weights=[(p.data_ptr(), version(p)) for table in weights for p in table.values() if p is not None])


def version(weight):
    """torch's counter of the changes of a tensor, 0 where it has none. `is_inference` would give up Python's lock."""
    try:
        return weight._version
    except RuntimeError:  # made in inference mode
        return 0


def token_list(prompt, vocab_size):
    """The tokens of a prompt as a list. ValueError unless there are some, all of a vocabulary."""
    try:
        ids = np.array(prompt)
    except ValueError:
        ids = np.array(0)
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in 'iu':
        raise ValueError("a prompt must be a list of at least one token id: begin with a newline, for example; not "
                         f"{str(prompt):.60}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(f"a prompt must be of token ids within the vocabulary of {vocab_size}, and this one has "
                         f"{ids.min()} to {ids.max()}")
    return ids.tolist()


def context_of(config, when_full, keep, n_keep, n_prompt):
    """(n_keep, keep) of a `Sequence`. ValueError if these do not fit a model."""
    c = config
    endless = c.max_positions != c.block_size
    if when_full not in (None, 'crop', 'shift') or endless and when_full:
        expected = 'left out for a model without a full context' if endless else 'crop or shift'
        raise ValueError(f"when_full must be {expected}, not {when_full!r}")
    if when_full != 'shift':
        if keep is not None or n_keep:
            raise ValueError(f"keep={keep} and n_keep={n_keep} say what is left of a full context: pass "
                             "when_full='shift' with them")
        return 0, c.max_positions
    kept = min(n_keep, n_prompt)
    last = keep or max(1, min(c.block_size // 2, c.block_size - kept))
    if kept + last > c.block_size:
        raise ValueError(f"n_keep={kept} and keep={last} tokens of a full context, of these at least 1, must fit in "
                         f"{c.block_size}")
    return kept, last


def default_pool(config, n_pages=None, page_size=PAGE_SIZE, type_kv='float32'):
    """A pool of n_pages pages, by default N_PAGES, or as many as a sequence can take, with POOL_BYTES bytes at most."""
    c, most = config, POOL_BYTES // bytes_of_slots(config, page_size, type_kv)
    n_pages = n_pages or max(1, min(max(N_PAGES, pages_for(c, page_size)), most))
    return PagePool(n_pages, page_size, c.window, c.n_sink)


def pool_for(config, n_sequences, n_tokens):
    """
    A pool for so many sequences of up to n_tokens tokens each, which all run at once. Without a window a page is as
    large as a sequence, so the keys and values of a sequence are side by side.
    """
    c = config
    n_tokens = min(n_tokens, c.max_positions)
    if c.window:
        return PagePool(n_sequences * pages_for(c, PAGE_SIZE), PAGE_SIZE, c.window, c.n_sink)
    return PagePool(n_sequences, n_tokens)
