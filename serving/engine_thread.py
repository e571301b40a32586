"""
The thread that owns the engine: it takes requests from an inbox, makes one call after the other, and hands out tokens.

    thread = EngineThread(engine, token_bytes)
    thread.start()
    thread.submit(Request('1', [5, 6, 7], deliver=print))
"""
import sys
import threading
import time
import traceback
from collections import deque

from decode.draw import log_probabilities
from engine.sequence import AHEAD_OF_STOPS, MOST_AHEAD
from serving.request import Logprobs, Output, chunk_interval
from serving.stats import Stats
from tokenizer import TextStream, WholeTexts

LOOKED_AT = 2.0          # seconds after a call of `state` in which it is kept up to date
BETWEEN_SNAPSHOTS = 0.1  # seconds, at least
IDLE = 1.0               # seconds that the thread waits for a request at a time


class QueueFull(Exception):
    """Too many requests are waiting: try again later."""


class OpenRequest:
    """A request that has not ended."""

    def __init__(self, request):
        self.request, self.time = request, time.monotonic()
        self.sequences = []               # its own, empty before it begins
        self.going = {*range(request.n)}  # the numbers of its samples that go on
        self.outputs = []                 # that are not delivered yet
        self.begun, self.delivered = False, float('-inf')  # was anything delivered, and when was the last of it?
        self.prompt_logprobs = []         # `Logprobs` of the prompt's tokens so far, from the second on

    @property
    def has_prompt(self):
        """Are there the log probabilities of the whole prompt, if they are wanted? The first output has them."""
        r = self.request
        return self.begun or not r.prompt_logprobs or len(self.prompt_logprobs) >= len(r.prompt) - 1


class Sample:
    """The owner of a sequence: sample number `index` of an `OpenRequest`. stream: a `TextStream`."""

    def __init__(self, live, index, stream):
        self.live, self.index, self.stream, self.first_time = live, index, stream, None


class EngineThread:
    """
    engine: an `engine.Engine`. token_bytes: the bytes of each token id, a list. end_tokens: those that
    end a text. special_ids: those that are not part of a text, unless a request asks. max_queue: the most samples whose
    requests wait for their first call.

    stats: see `stats.Stats`. dead: has the thread ended without `stop`? Any thread may call `start`, `submit`, `abort`,
    `drain`, `stop` and `state`.
    """

    def __init__(self, engine, token_bytes, end_tokens=(), special_ids=(), max_queue=1024):
        self.engine, self.vocab_size = engine, engine.model.config.vocab_size
        bytes_of = token_bytes.__getitem__
        self.end_tokens, self.all_texts = end_tokens, WholeTexts(bytes_of)
        self.texts = WholeTexts(lambda token: b'' if token in special_ids else bytes_of(token))
        # {text: id}; a tokenizer may have more of them than the model has rows
        self.special_ids = {self.all_texts[token]: token for token in special_ids if token < self.vocab_size}
        self.stats = Stats(engine, bytes_of)
        self.max_queue, self.is_drafted = max_queue, hasattr(engine.executor, 'draft')
        self.condition, self.inbox, self.live = threading.Condition(), deque(), {}  # live: {request id: OpenRequest}
        self.draining = self.stopping = self.dead = False
        self.thread, self.looked_at = None, float('-inf')
        self.take_snapshot()

    def start(self):
        self.thread = threading.Thread(target=self.run, name='engine', daemon=True)
        self.thread.start()

    def submit(self, *requests):
        """
        Put requests into the inbox, all or none, each with an id of its own. `QueueFull` if too many wait or the engine
        stops.
        """
        with self.condition:
            if self.draining:
                raise QueueFull("the server is stopping and takes no requests: send it again later")
            n_queued = sum([live.request.n for live in self.live.values()  # a preempted one has begun
                            if not live.sequences or live.sequences[0].n_found is None])
            n = sum(request.n for request in requests)
            if n_queued + n > self.max_queue:
                raise QueueFull(f"{n_queued:,} samples are waiting, this request has {n:,}, and at most "
                                f"{self.max_queue:,} may wait: try again later")
            new = {request.id: OpenRequest(request) for request in requests}
            self.live |= new
            self.ask_for([(self.begin, live) for live in new.values()])

    def abort(self, request_id):
        """End a request, if it has not ended: its slots are free by the next call."""
        with self.condition:
            if request_id in self.live:  # a later request may have this id again
                self.ask_for([(self.end, self.live[request_id], 'abort')])

    def drain(self, seconds):
        """Take no new requests, wait for the end of those that there are, and abort what runs after so many seconds."""
        with self.condition:
            self.draining = True
            self.condition.wait_for(lambda: not self.live or self.stopping, seconds)
            self.ask_for([(self.end, live, 'abort') for live in self.live.values()])
            self.condition.wait_for(lambda: not self.live or self.stopping, IDLE)
            for live in self.live.values():  # a call takes longer than that
                live.request.deliver([Output(0, [], finish_reason='abort')])

    def stop(self):
        """End the thread after the present call, and abort what has not ended."""
        with self.condition:
            self.draining = self.stopping = True
            self.ask_for([])
        self.thread.join()

    def ask_for(self, operations):
        """Have the thread run these before its next call: each is (function, `OpenRequest`, ...). The lock is held."""
        self.inbox.extend(operations)
        self.engine.return_soon[0] = 1
        self.condition.notify_all()

    def state(self):
        """
        The pool and the queue, a dict, see `stats.Stats.snapshot`: as they are if there is no request, otherwise as
        they were after a recent call. For LOOKED_AT seconds after this was called they are kept up to date; the first
        call may return an old state.
        """
        self.looked_at = time.monotonic()
        with self.condition:
            is_of_requests = self.snapshot['running'] or self.snapshot['waiting']
            if not self.live and (is_of_requests or self.looked_at >= self.snapshot['time'] + 4 * self.took):
                self.take_snapshot()
        return self.snapshot

    def take_snapshot(self):
        """Look at the pool and the queue. `took` becomes the seconds this takes, some tenths for 100,000 blocks."""
        began = time.monotonic()
        self.snapshot = self.stats.snapshot()
        self.took = time.monotonic() - began

    # the methods below run in the thread that calls the engine

    def run(self):
        try:
            with self.engine.executor.torch_on_one_thread():
                while not self.stopping:
                    try:
                        if not self.run_once():
                            with self.condition:
                                self.condition.wait_for(lambda: self.inbox or self.stopping, IDLE)
                    except Exception as e:  # of the engine itself: nothing is known of what it was at
                        traceback.print_exc(file=sys.stderr)
                        self.end_all('error', e)
        finally:
            with self.condition:
                self.dead, self.draining, self.stopping = not self.stopping, True, True
            self.end_all('abort')

    def run_once(self):
        """Do what was asked for, make a call, and hand out what it gives. Returns whether there was anything to do."""
        self.empty_inbox()
        if self.engine.is_idle:
            return False
        self.engine.longest_call = chunk_interval(len(self.live))
        self.hand_out(self.engine.step())
        due = self.snapshot['time'] + max(BETWEEN_SNAPSHOTS, 20 * self.took)
        if due < time.monotonic() < self.looked_at + LOOKED_AT:
            self.take_snapshot()
        return True

    def empty_inbox(self):
        """Do what other threads have asked for since the last call, in that order."""
        self.engine.return_soon[0] = self.stopping  # before the inbox is read: what comes later sets it again
        while self.inbox:
            operation, live, *more = self.inbox.popleft()
            if self.live.get(live.request.id) is live:  # it has not ended
                try:
                    operation(live, *more)
                except Exception as e:  # of this request alone
                    self.end(live, 'error', e)

    def begin(self, live):
        r = live.request
        stop_ids = {*r.stop_token_ids, *(() if r.ignore_eos else self.end_tokens),
                    *(self.special_ids[text] for text in r.stop if text in self.special_ids)}
        texts = self.texts if r.skip_special else self.all_texts
        streams = [TextStream(texts, r.stop, r.draw.get('min_tokens', 0), r.include_stop, r.strip) for _ in range(r.n)]
        live.sequences = self.engine.add(
            r.prompt, r.max_tokens, r.n, r.seed, stop_ids, salt=r.cache_salt, prompt_logits=r.prompt_logprobs,
            logprobs=r.logprobs is not None, most_ahead=AHEAD_OF_STOPS if r.stop else MOST_AHEAD,
            constraint=r.constraint, **r.draw)
        for i, (s, stream) in enumerate(zip(live.sequences, streams)):
            s.owner = Sample(live, i, stream)
        self.stats.requests += 1
        self.stats.prompt_tokens += len(r.prompt)

    def hand_out(self, results):
        """
        Deliver what a call has given, the outputs of a request together. A delivery takes as long as some steps, and a
        call with drafts gives few tokens. So with drafts, outputs wait half of `longest_call` after the last delivery.
        """
        now, interval = time.monotonic(), self.engine.longest_call / 2 if self.is_drafted else 0.0
        for s, given in results:
            live = s.owner.live
            if s.owner.index not in live.going:  # it has ended with another one of its request
                continue
            try:
                if s.error:
                    raise s.error
                if output := self.output_of(s, given, now):
                    live.outputs.append(output)
            except Exception as e:
                self.end(live, 'error', e)
        for live in list(self.live.values()):
            if live.outputs and (not live.going or live.has_prompt and now >= live.delivered + interval):
                self.deliver(live)

    def output_of(self, s, given, now):
        """The `Output` of a sequence for what a call has given it, or None if that is nothing."""
        sample, r, text, reason, logprobs = s.owner, s.owner.live.request, '', s.ended, None
        stream, new, logits = sample.stream, given.tokens, given.logits
        if s.prompt_logits and given.first < s.n_prompt - 1 and logits is not None and s.n_drawn == len(new):
            self.note_prompt(s, given.first, logits)
        if new and r.logprobs is not None:
            logprobs = logprobs_of(logits[len(logits) - len(new):], new, r.logprobs)
        if new:
            sample.first_time = sample.first_time or now
            is_last = s.ended == 'stop' and not r.include_stop  # the last token is one that ends it
            text = stream.push(*(new[:-1] if is_last else new))
            if stream.stopped:
                n = stream.n_pushed - (s.n_drawn - len(new))
                del new[n:], (logprobs or [])[n:]
                self.engine.end(s, 'stop', s.n_prompt + stream.n_pushed)
                reason = 'stop'
            self.stats.generated_tokens += len(new)
        if reason:
            text += stream.finish()
            sample.live.going.remove(sample.index)
            self.stats.finished[reason] += 1
            if s.n_drawn > 1:
                self.stats.per_token.observe((now - sample.first_time) / (s.n_drawn - 1))
        if new or reason:
            return Output(sample.index, new, text, logprobs, reason)

    def note_prompt(self, s, first, logits):
        """Note the log probabilities of the prompt's tokens from first + 1 on. logits: of positions from first on."""
        live = s.owner.live
        del live.prompt_logprobs[first:]  # they are there if the sequence lost its slots and is computed again
        targets = s.tokens[first + 1:min(first + 1 + len(logits), s.n_prompt)]
        live.prompt_logprobs += logprobs_of(logits[:len(targets)], targets, live.request.logprobs or 0)

    def deliver(self, live):
        """Hand its outputs to a request. One that has ended is forgotten. One whose `deliver` raises is ended."""
        outputs, live.outputs, live.delivered = live.outputs, [], time.monotonic()
        if not live.begun:
            live.begun, first = True, live.sequences[0] if live.sequences else None
            if first and (first.n_found is not None or first.n_prompt == 1):  # it ran, or had nothing to compute
                if outputs[0].token_ids:
                    self.stats.first_token.observe(time.monotonic() - live.time)
                of_prompt = [None, *live.prompt_logprobs] if live.request.prompt_logprobs else None
                outputs[0] = outputs[0]._replace(n_cached=first.n_found or 0, prompt_logprobs=of_prompt)
        try:
            live.request.deliver(outputs)
        except Exception as e:
            print(f"request {live.request.id} is aborted, nobody takes its tokens: {e!r}", file=sys.stderr)
            self.give_up(live, 'abort')
        if not live.going:
            with self.condition:
                self.live.pop(live.request.id, None)
                self.condition.notify_all()

    def give_up(self, live, reason):
        """End the samples of a request that go on."""
        self.stats.finished[reason] += len(live.going)
        live.going.clear()
        for s in live.sequences:
            self.engine.end(s, reason)

    def end(self, live, reason, error=None):
        """End a request, and say so, in whatever state the engine is."""
        live.outputs += [Output(i, [], finish_reason=reason, error=error) for i in sorted(live.going)]
        try:
            self.give_up(live, reason)
        finally:
            self.deliver(live)

    def end_all(self, reason, error=None):
        with self.condition:
            self.inbox.clear()
            all_live = list(self.live.values())
        for live in all_live:
            try:
                self.end(live, reason, error)
            except Exception:
                traceback.print_exc(file=sys.stderr)


def logprobs_of(logits, tokens, k):
    """A `Logprobs` with the k likeliest tokens for each row of logits and its token."""
    rows = zip(*log_probabilities(logits, tokens, k))
    return [Logprobs(logprob, list(zip(top, values))) for logprob, top, values in rows]
