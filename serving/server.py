"""
The HTTP side: what is served at which address, and how the process starts and ends. All of it runs on one event loop;
the engine has a thread of its own.
"""
import asyncio
import hmac
import os
import random
import socket
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from serving.answer import JSON, Answer, Bell, ChatCompletion, Completion, Mailbox, name_of_token
from serving.api import (
    APIError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    invalid,
    parsed,
    requests_of,
    too_long,
)
from serving.engine import QueueFull
from serving.openapi import Endpoint, openapi
from serving.request import Output, check_ids
from serving.stats import FORMAT

MAX_BODY = 4 * 2**20  # bytes of a request
LONG_TEXT = 2000  # characters; a longer text is tokenized in a thread of its own
THREADS = {'template': 1, 'tokens': 2, 'answer': 1}  # of the pool for work of each kind
MOST_IN_POOL = 256  # calls of a kind that run or wait
CLOSING = 5       # seconds that a slow reader has for the rest of its answer, once the server has drained
KEEP_ALIVE = 75   # seconds that an idle connection is kept: longer than clients keep theirs, so that they close it
PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'page.html')
PAGE_HEADERS = {'content-security-policy': "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                                           "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
                                           "frame-ancestors 'none'", 'cache-control': 'no-cache'}


class Service:
    """
    What the app serves: an engine and its model, once they are loaded. load: a function that returns both, a started
    `Engine` and a `Served`. error: what load raised. draining: are no more requests taken?
    """

    def __init__(self, load, api_key=''):
        self.load, self.api_key = load, api_key
        self.engine = self.served = self.bell = self.error = None
        self.draining, self.mailboxes = False, set()
        self.pools = {kind: ThreadPoolExecutor(n, kind) for kind, n in THREADS.items()}
        self.n_in_pool = Counter()

    def start_loading(self, loaded):
        """Load in a thread of its own, while /health answers; then call `loaded`, also if loading failed."""
        def load():
            try:
                engine, self.served = self.load()
                self.engine = engine
            except BaseException as e:
                self.error = e
            loaded()
        threading.Thread(target=load, name='load', daemon=True).start()

    def check_loaded(self):
        """APIError 503 unless there is a model. It may be draining."""
        if self.engine is None:
            raise APIError(503, "the model is being loaded: try again later", code='loading',
                           headers={'retry-after': '5'})

    def check_ready(self):
        """APIError 503 unless requests are taken."""
        if self.draining:
            raise APIError(503, "the server is stopping: try again later", code='draining',
                           headers={'retry-after': '5'})
        self.check_loaded()

    def check_key(self, request):
        """APIError 401 unless the request has the key, where there is one."""
        given = request.headers.get('authorization', '')
        if self.api_key and not hmac.compare_digest(given.encode(), f'Bearer {self.api_key}'.encode()):
            raise APIError(401, "this server needs its API key: send the header Authorization: Bearer KEY",
                           code='invalid_api_key', headers={'www-authenticate': 'Bearer'})

    async def respond(self, endpoint, request):
        """The response of an `Endpoint` to a request."""
        if endpoint.key:
            self.check_key(request)
        if endpoint.body is None:
            return await endpoint.handler(self)
        self.check_ready()
        body = parsed(endpoint.body, await read(request), self.served.defaults)
        self.served.check_name(body.model)
        return await endpoint.handler(self, body)

    async def in_pool(self, kind, function):
        """
        What a function returns that may take long, called in a thread of the pool of its kind, see THREADS. APIError
        429 where MOST_IN_POOL of this kind run or wait.
        """
        if self.n_in_pool[kind] >= MOST_IN_POOL:
            raise APIError(429, f"{MOST_IN_POOL} requests wait for a thread ({kind}), and no more may: try again later",
                           code='queue_full', headers={'retry-after': '1'})
        self.n_in_pool[kind] += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.pools[kind], function)
        finally:
            self.n_in_pool[kind] -= 1

    def submit(self, requests, mailbox):
        """Submit all requests or none. APIError where the queue is full, or one of them can never fit."""
        self.check_ready()
        for i, request in enumerate(requests):
            try:
                self.engine.submit(request)
            except (QueueFull, ValueError) as e:
                for submitted in requests[:i]:
                    self.engine.abort(submitted.id)
                if isinstance(e, QueueFull):
                    raise APIError(429, str(e), code='queue_full', headers={'retry-after': '1'}) from None
                raise too_long(str(e)) from None
        self.mailboxes.add(mailbox)

    def end(self, completion, mailbox):
        """The client has its answer, or is gone: its requests that still run are aborted."""
        self.mailboxes.discard(mailbox)
        if not completion.done or completion.error:
            for request in completion.requests:
                self.engine.abort(request.id)

    async def drain(self, seconds):
        """Take no more requests, let those that run finish within this time, and abort the others."""
        self.draining = True
        if self.engine is None:
            return
        await asyncio.to_thread(self.engine.drain, seconds)
        for mailbox in list(self.mailboxes):  # those that are not finished
            mailbox.put(0, [Output(0, [], finish_reason='abort')])


async def read(request):
    """The bytes of a request's body. APIError 413 if they are more than MAX_BODY."""
    length, data = request.headers.get('content-length', ''), bytearray()
    if not length.isdecimal() or int(length) <= MAX_BODY:
        async for part in request.stream():
            data += part
            if len(data) > MAX_BODY:
                break
        else:
            return bytes(data)
    raise APIError(413, f"the body has more than {MAX_BODY:,} bytes, the most that this server reads",
                   headers={'connection': 'close'})


def make_app(service, cors_origin='', loaded=lambda: None):
    """
    The Starlette app of a `Service`. It begins to load the model when it starts, and stops the engine when it ends.

    cors_origin: the origin whose pages may read the answers, or * for all; by default only the server's own page may.
    loaded: called when the model is loaded, or could not be.
    """
    @asynccontextmanager
    async def lifespan(app):
        service.bell = Bell(asyncio.get_running_loop())
        service.start_loading(loaded)
        yield
        if service.engine is not None:
            await asyncio.to_thread(service.engine.stop)

    routes = [Route(endpoint.path, partial(service.respond, endpoint), methods=[endpoint.method])
              for endpoint in ENDPOINTS]
    middleware = [Middleware(CORSMiddleware, allow_origins=[cors_origin], allow_methods=['GET', 'POST'],
                             allow_headers=['authorization', 'content-type'])] * bool(cors_origin)
    handlers = {APIError: error_answer, HTTPException: http_error, ClientDisconnect: no_answer, Exception: server_error}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


async def error_answer(request, e):
    return JSON(e.json(), e.status, e.headers)


async def http_error(request, e):
    """An address that does not exist, or does with another method."""
    message = (f"this server does not answer {request.method} {request.url.path[:100]}: GET /openapi.json lists what "
               "it answers")
    return JSON(APIError(e.status_code, message).json(), e.status_code, e.headers)


async def server_error(request, e):
    """A bug. Starlette raises the exception again, so that its traceback is logged."""
    return JSON(APIError(500, f"the server failed with {type(e).__name__}: its log says where").json(), 500)


async def no_answer(request, e):
    """The client went away before its body was complete."""
    return Response(status_code=400)


async def completions(service, body):
    """Continue prompts"""
    long = sum(map(len, body.prompt)) > LONG_TEXT
    return await generate(service, body, 'cmpl', len(body.prompt), Completion, 'tokens' if long else None)


async def chat(service, body):
    """Answer in a conversation"""
    return await generate(service, body, 'chatcmpl', 1, ChatCompletion, 'template')


async def generate(service, body, prefix, n_prompts, kind, pool):
    """The `Answer` to a body, of this kind, whose requests are submitted. pool: make these in it, see `in_pool`."""
    id, mailbox = f'{prefix}-{random.getrandbits(96):024x}', Mailbox(service.bell, listening=body.stream)
    delivers = [partial(mailbox.put, number) for number in range(n_prompts)]

    def make():
        return kind(id, body, service.served, requests_of(body, service.served, id, delivers))
    completion = await service.in_pool(pool, make) if pool else make()
    service.submit(completion.requests, mailbox)
    return Answer(service, completion, mailbox)


async def models(service):
    """The model that is served"""
    service.check_loaded()
    served = service.served
    model = {'id': served.name, 'object': 'model', 'created': served.created, 'owned_by': 'nanogpt',
             'max_model_len': served.max_tokens, 'chat': served.tokenizer.chat_template is not None}
    return JSON({'object': 'list', 'data': [model]})


async def health(service):
    """Does the server take requests?"""
    service.check_ready()
    return JSON({'status': 'ok'})


async def metrics(service):
    """Counters and histograms for Prometheus"""
    service.check_loaded()
    return Response(service.engine.stats.text(), headers={'content-type': FORMAT})


async def tokenize(service, body):
    """The tokens of a text or of a conversation"""
    served = service.served
    if body.messages is not None:
        tokens = await service.in_pool('template', partial(served.conversation, body))
    elif body.prompt is None:
        raise invalid('prompt', "prompt is missing: the body must have it, or messages")
    else:
        encode = partial(served.encode, body.prompt, body.add_special_tokens is not False)
        tokens = await service.in_pool('tokens', encode)
    names = [name_of_token(served.token_bytes[token]) for token in tokens] if body.return_token_strs else None
    return JSON({'tokens': tokens, 'count': len(tokens), 'max_model_len': served.max_tokens, 'token_strs': names})


async def detokenize(service, body):
    """The text of tokens"""
    try:
        check_ids('tokens', body.tokens, len(service.served.token_bytes))
    except ValueError as e:
        raise invalid('tokens', str(e)) from None
    return JSON({'prompt': await service.in_pool('tokens', partial(service.served.tokenizer.decode, body.tokens))})


async def cache(service):
    """The pool of blocks and the requests, as the page shows them"""
    service.check_loaded()
    return JSON(service.engine.state(), headers={'cache-control': 'no-store'})


async def description(service):
    """This description"""
    return JSON(openapi(ENDPOINTS, bool(service.api_key)))


async def page(service):
    """The page"""
    with open(PAGE, encoding='utf-8') as f:
        return HTMLResponse(f.read(), headers=PAGE_HEADERS)


ENDPOINTS = [
    Endpoint('POST', '/v1/completions', completions, 'Completion', (429, 500, 503), body=CompletionBody),
    Endpoint('POST', '/v1/chat/completions', chat, 'ChatCompletion', (429, 500, 503), body=ChatBody),
    Endpoint('GET', '/v1/models', models, 'Models'),
    Endpoint('POST', '/tokenize', tokenize, 'Tokens', body=TokenizeBody),
    Endpoint('POST', '/detokenize', detokenize, 'Text', body=DetokenizeBody),
    Endpoint('GET', '/cache', cache, 'Cache'),
    Endpoint('GET', '/health', health, 'Health', key=False),
    Endpoint('GET', '/metrics', metrics, 'text/plain', key=False),
    Endpoint('GET', '/openapi.json', description, 'Description', (), key=False),
    Endpoint('GET', '/', page, 'text/html', (), key=False),
]


class Process(uvicorn.Server):
    """
    uvicorn, but for how it ends: the first SIGTERM or SIGINT drains within drain_seconds, a second one ends at once.
    """

    def __init__(self, config, service, drain_seconds):
        super().__init__(config)
        self.service, self.drain_seconds, self.loop, self.drainer = service, drain_seconds, None, None

    async def serve(self, sockets=None):
        self.loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig, frame):
        if self.service.draining or self.service.error:
            os._exit(128 + sig)
        self.service.draining = True
        print(f"stopping: requests that run have {self.drain_seconds:g} s to finish; a second signal ends at once",
              file=sys.stderr)
        self.loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self):
        self.drainer = asyncio.ensure_future(self.drain())

    async def drain(self):
        try:
            await self.service.drain(self.drain_seconds)
        finally:
            self.should_exit = True

    def loaded(self):
        """Called in the thread that loads the model: without one there is nothing to serve."""
        self.should_exit = self.should_exit or self.service.error is not None


def listen(host, port):
    """A listening socket. port: 0 takes any that is free. OSError if the port cannot be had."""
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as e:
        raise OSError(f"port {port} of {host} cannot be had ({e.strerror or e}): choose another --port") from e
    # asyncio sets this option only on sockets that it makes itself. Without it the system sends the body of a response
    # only after the client has acknowledged the headers, about 40 ms later.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def run(service, host, port, drain_seconds, cors_origin=''):
    """Serve until a signal comes, and print the address. OSError if the port cannot be had; what loading raised."""
    listener = listen(host, port)
    name = f'[{host}]' if ':' in host else host
    print(f"the page: http://{name}:{listener.getsockname()[1]}/   the API: /v1/completions", file=sys.stderr)
    config = uvicorn.Config(None, log_level='warning', access_log=False, lifespan='on', ws='none', server_header=False,
                            timeout_graceful_shutdown=CLOSING, timeout_keep_alive=KEEP_ALIVE)
    process = Process(config, service, drain_seconds)
    config.app = make_app(service, cors_origin, process.loaded)
    process.run([listener])
    if service.error is not None:
        raise service.error
