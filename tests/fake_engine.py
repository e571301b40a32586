"""
An engine without a model, for tests of the server: the k-th token that a sample with seed s draws is (s + k) modulo the
vocabulary. It steps when a test says so, or in a thread.
"""
import threading
from collections import deque
from types import SimpleNamespace

from serving.api import Served
from serving.engine import QueueFull
from serving.metrics import COUNTERS, GAUGES
from serving.request import Logprobs, Output
from tokenizer import CharTokenizer, TextStream

CHARS = 'abcdefghijklmnopqrstuvwxyz .€😀\n'
SERVED = Served('fake', CharTokenizer(CHARS), CharTokenizer(CHARS).bytes_of_tokens(), 64)


def text_of(seed, n):
    """The text of the first n tokens of a sample."""
    return ''.join(CHARS[(seed + k) % len(CHARS)] for k in range(n))


def score(token, params):
    """The `Logprobs` of a token: a made-up number, and the tokens before it as the likeliest."""
    return Logprobs(token, -token / 8, 1, [(i, -i / 8) for i in range(params.logprobs)])


class FakeEngine:
    """
    n_slots: requests that run at a time. max_queue: requests that wait. raises: what each submit raises. seconds:
    observations for the metrics.
    """

    def __init__(self, n_slots=4, max_queue=4, served=SERVED):
        self.n_generated, self.seconds = 0, deque()
        self.n_slots, self.max_queue, self.served, self.raises = n_slots, max_queue, served, None
        self.waiting, self.running, self.aborted, self.finished = [], [], [], []
        self.lock, self.changed, self.thread, self.stopped = threading.RLock(), threading.Condition(), None, False
        self.may_step = threading.Event()  # a thread waits for it before each step
        self.may_step.set()

    def start(self):
        def loop():
            while not self.stopped:
                self.may_step.wait()
                if not self.step():
                    with self.changed:
                        self.changed.wait(0.1)
        self.thread = threading.Thread(target=loop, daemon=True)
        self.thread.start()

    def notify(self):
        with self.changed:
            self.changed.notify_all()

    def until(self, condition):
        """Wait until the condition holds; it is looked at after each submit, step and abort."""
        with self.changed:
            assert self.changed.wait_for(condition, 20)

    def submit(self, request):
        with self.lock:
            if self.raises:
                raise self.raises
            if len(self.waiting) >= self.max_queue:
                raise QueueFull(f"{len(self.waiting)} requests wait, the most that may")
            self.waiting.append(request)
        self.notify()

    def abort(self, id):
        with self.lock:
            for queue in (self.waiting, self.running):
                for request in [r for r in queue if r.id == id]:
                    queue.remove(request)
                    self.aborted.append(id)
        self.notify()

    def admit(self):
        """Begin what waits, where there is a slot for it."""
        with self.lock:
            while self.waiting and len(self.running) < self.n_slots:
                request = self.waiting.pop(0)
                request.texts = [TextStream(self.served.token_bytes, request.stop) for _ in range(request.n)]
                request.counts, request.ended = [0] * request.n, [False] * request.n
                self.running.append(request)

    def step(self):
        """One token for each sample that runs. Returns how many requests ran."""
        with self.lock:
            self.admit()
            ran = self.running[:]
            for request in ran:
                outputs = [self.output(request, i) for i in range(request.n) if not request.ended[i]]
                if all(request.ended):
                    self.running.remove(request)
                    self.finished.append(request.id)
                request.deliver(outputs)
        self.notify()
        return len(ran)

    def output(self, request, i):
        first, prompt_logprobs = request.counts[i] == 0, None
        if first and i == 0 and request.params.prompt_logprobs:
            prompt_logprobs = [None, *(score(token, request.params) for token in request.prompt[1:])]
        n_cached = 2 if first and i == 0 else None
        if request.max_tokens == 0:
            request.ended[i] = True
            return Output(i, [], '', None if request.params.logprobs is None else [], 'length', prompt_logprobs,
                          n_cached)
        token = (request.seed + i + request.counts[i]) % len(self.served.token_bytes)
        request.counts[i] += 1
        self.n_generated += 1
        text, reason = request.texts[i].push(token), None
        if request.texts[i].stopped or token in request.params.stop_token_ids:
            reason = 'stop'
        elif request.counts[i] == request.max_tokens:
            reason = 'length'
        if reason:
            request.ended[i], text = True, text + request.texts[i].finish()
        scores = None if request.params.logprobs is None else [score(token, request.params)]
        return Output(i, [token], text, scores, reason, prompt_logprobs, n_cached)

    def fail(self):
        """End all that runs with an error."""
        with self.lock:
            ran, self.running = self.running, []
            for request in ran:
                request.deliver([Output(i, [], finish_reason='error', error="numbers that are not finite")
                                 for i in range(request.n)])

    def drain(self, seconds):
        with self.changed:
            self.changed.wait_for(lambda: not self.waiting and not self.running, seconds)

    def stop(self):
        self.stopped = True
        self.notify()

    def state(self):
        return {'running': [request.id for request in self.running]}

    @property
    def stats(self):
        numbers = dict.fromkeys([*GAUGES, *COUNTERS], 0) | {'generated_tokens': self.n_generated}
        return SimpleNamespace(finished={'stop': 2}, first_token=self.seconds, per_token=deque(), **numbers)
