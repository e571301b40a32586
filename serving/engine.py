"""
The thread that owns model and cache: it takes requests from an inbox, and runs one step after the other.

    engine = Engine(model, decoder, token_bytes)
    engine.start()
    engine.submit(Request('1', [5, 6, 7], deliver=print))
"""
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import nullcontext

from kvcache.paged import PagedCache, n_blocks_for
from serving.core import EngineCore, Live
from serving.request import check_ids
from serving.stats import Snapshots

N_BLOCKS, MEMORY = 1024, 2**30  # of a pool at most, by default; bytes of keys and values
WORK = 2**33                    # weights times tokens of a step, by default: a few tenths of a second on two cores
LOOKED_AT = 2.0                 # seconds after a call of `state` in which it is kept up to date
BETWEEN_SNAPSHOTS = 0.1         # seconds, at least
IDLE = 1.0                      # seconds that the thread waits for a request at a time


class QueueFull(Exception):
    """Too many requests are waiting: try again later."""


class Draining(QueueFull):
    """The engine stops, and takes no requests any more."""


class Engine:
    """
    model, decoder: a GPT, and what `decode.best` makes of it. token_bytes: the bytes of each token id, a list or a
    function. end_tokens: those that end a text. special_ids: those that are not part of a text, unless a request asks.
    n_blocks, page_size, type_kv: of the pool, see `PagedCache`; by default N_BLOCKS, or as many as a sequence can take,
    but no more than MEMORY bytes. max_num_batched_tokens: the most tokens of a step, which all samples wait for; by
    default 64 to 512, fewer for larger models. max_queue: the most samples whose requests wait for their first step.

    The tokens and log probabilities of a sample are those that it has alone, with a compiled step bit for bit, whoever
    else is served, whatever is remembered, and whenever it was preempted. When a sequence begins after the weights have
    changed, all keys and values are computed again with the new ones, and each sample goes on behind its tokens.

    stats: see `stats.Stats`. dead: has the thread ended without `stop`? Any thread may call `start`, `submit`, `abort`,
    `drain`, `stop` and `state`.
    """

    def __init__(self, model, decoder, token_bytes, end_tokens=(), n_blocks=None, page_size=16,
                 max_num_batched_tokens=None, max_queue=1024, type_kv='float32', special_ids=()):
        model.eval()
        check_ids('end_tokens', end_tokens, model.config.vocab_size)
        n_blocks = n_blocks or default_n_blocks(model.config, page_size)
        self.decoder, self.cache = decoder, PagedCache(model, n_blocks, page_size, type_kv, decoder)
        bytes_of = token_bytes if callable(token_bytes) else token_bytes.__getitem__
        budget = max_num_batched_tokens or max(64, min(512, WORK // sum(p.numel() for p in model.parameters())))
        self.core = EngineCore(self.cache, bytes_of, end_tokens, special_ids, budget, self.ended)
        self.scheduler, self.stats = self.core.scheduler, self.core.stats
        self.snapshots = Snapshots(self.scheduler, self.stats, bytes_of)
        self.vocab_size, self.max_queue = model.config.vocab_size, max_queue
        self.condition, self.inbox, self.live = threading.Condition(), deque(), {}  # live: {request id: Live}
        self.draining = self.stopping = self.dead = False
        self.thread, self.looked_at = None, float('-inf')
        self.idle, self.snapshot = True, self.snapshots.take()  # idle: is the thread waiting, or not there?

    def start(self):
        self.thread = threading.Thread(target=self.run, name='engine', daemon=True)
        self.thread.start()

    def submit(self, request):
        """
        Begin a request. `QueueFull` if too many wait, `Draining` if the engine stops; ValueError if the request does
        not fit the model or can never fit the pool, and if there is one with its id.
        """
        request.check_tokens(self.vocab_size)
        self.scheduler.check(request)
        with self.condition:
            if self.draining:
                raise Draining("the server is stopping and takes no requests: send it again later")
            if request.id in self.live:
                raise ValueError(f"there is a request with the id {request.id!r} already: give each one its own")
            n_queued = sum([live.request.n for live in self.live.values()  # a preempted one has begun
                            if not live.samples or live.samples[0].n_cached is None])
            if n_queued + request.n > self.max_queue:
                raise QueueFull(f"{n_queued:,} samples are waiting, this request has {request.n:,}, and at most "
                                f"{self.max_queue:,} may wait: try again later")
            live = self.live[request.id] = Live(request)
            self.ask_for([(self.core.begin, live)])

    def abort(self, request_id):
        """End a request, if it has not ended: its blocks are free by the next step."""
        with self.condition:
            if request_id in self.live:  # a later request may have this id again
                self.ask_for([(self.abort_now, self.live[request_id])])

    def drain(self, seconds):
        """
        Take no new requests, wait until those that there are have ended, and abort what has not after so many seconds.
        Returns whether all have ended by themselves.
        """
        with self.condition:
            self.draining = True
            finished = self.condition.wait_for(lambda: not self.live or self.stopping, seconds)
            self.ask_for([(self.abort_now, live) for live in self.live.values()])
            self.condition.wait_for(lambda: not self.live or self.stopping, seconds + IDLE)
        return finished

    def stop(self):
        """End the thread after the present step, and abort what has not ended."""
        with self.condition:
            self.draining = self.stopping = True
            self.ask_for([])
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()

    def ask_for(self, operations):
        """Have the engine's thread call functions before its next step: pairs (function, `Live`). The lock is held."""
        self.inbox.extend(operations)
        self.core.stop_soon()
        self.condition.notify_all()

    def state(self):
        """
        The pool and the queue, a dict, see `stats.Snapshots`: as they are if the engine is idle, otherwise as they
        were after a recent step. While it is looked at it is kept up to date; the first call may find an old one.
        """
        self.looked_at = time.monotonic()
        with self.condition:
            if self.idle:
                self.snapshot = self.snapshots.take()
        return self.snapshot

    # from here on: the engine's thread

    def run(self):
        one_thread = getattr(self.decoder, 'torch_on_one_thread', nullcontext)
        self.idle = False
        try:
            with one_thread():
                while not self.stopping:
                    try:
                        if not self.run_once():
                            self.wait()
                    except Exception as e:  # of the engine itself: nothing is known of what it was at
                        traceback.print_exc(file=sys.stderr)
                        self.end_all('error', f"the engine failed: {e}")
        finally:
            with self.condition:
                self.dead, self.draining, self.stopping = not self.stopping, True, True
            self.end_all('abort')
            self.idle = True

    def wait(self):
        with self.condition:
            if not self.inbox and not self.stopping:
                self.idle = True
                self.condition.wait(IDLE)
            self.idle = False

    def run_once(self):
        """Receive what has come, and run a step, or some. Returns whether there was anything to run."""
        self.receive()
        plan, n_steps = self.core.plan()
        if n_steps:
            self.core.repeat(plan, n_steps)
        elif plan:
            self.core.step(plan)
        if self.snapshot['time'] + BETWEEN_SNAPSHOTS < time.monotonic() < self.looked_at + LOOKED_AT:
            self.snapshot = self.snapshots.take()
        return bool(plan)

    def receive(self):
        """Do what other threads have asked for since the last step, in that order."""
        self.core.sampler.stop_soon[0] = self.stopping  # before the inbox is read: what comes later sets it again
        while self.inbox:
            operation, live = self.inbox.popleft()
            if self.live.get(live.request.id) is live:  # it has not ended
                try:
                    operation(live)
                except Exception as e:  # of this request alone
                    self.core.end(live, 'error', f"{type(e).__name__}: {e}")

    def abort_now(self, live):
        self.core.end(live, 'abort')

    def end_all(self, reason, error=None):
        with self.condition:
            self.inbox.clear()
            all_live = list(self.live.values())
        self.core.end_all(all_live, reason, error)
        self.snapshot = self.snapshots.take()

    def ended(self, live):
        with self.condition:
            self.live.pop(live.request.id, None)
            self.condition.notify_all()


def default_n_blocks(config, page_size):
    """N_BLOCKS, or as many as a sequence can take, but no more than MEMORY holds in float32."""
    n_bytes = page_size * config.n_layer * 2 * config.n_kv_head * config.head_dim * 4
    return max(1, min(max(N_BLOCKS, n_blocks_for(config, page_size)), MEMORY // n_bytes))
