"""
The HTTP side: what is served at which address, and how the process starts and ends. All of it runs on one event loop;
the engine has a thread of its own.
"""
import asyncio
import errno
import hmac
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

import uvicorn
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from formats.tokenizer_files import huggingface_tokenizer
from serving import BEGAN
from serving.answer import JSON, Answer, Bell, ChatCompletion, Completion, Mailbox, name_of_token
from serving.api import APIError, invalid, parsed
from serving.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from serving.connection import IDLE, Connection
from serving.engine_thread import QueueFull
from serving.openapi import Endpoint, openapi
from serving.responses import ModelResponse, ResponseBody, renamed
from serving.served import requests_of

FORMAT = 'text/plain; version=0.0.4; charset=utf-8'  # that `generate_latest` writes
MAX_BODY = 4 * 2**20  # bytes of a request
LONG_TEXT = 2000  # characters; a longer text is tokenized, and a form compiled, in a thread of its own
THREADS = {'template': 1, 'tokens': 2, 'answer': 1}  # for work of each kind
PATIENCE, MOST_WAITING = 10, 512  # seconds that a request may wait for a thread; how many may, for each kind
LOCAL = '127.0.0.1', '::1', '::ffff:127.0.0.1'  # addresses of a client on this machine
THIS_MACHINE = r'(localhost|.*\.localhost|127\.[\d.]+|\[::1\])(:\d*)?'
CLOSING = 5       # seconds that a slow reader has for the rest of its answer, once the server has drained
BACKLOG, ACCEPTED = 2048, 4  # connections that wait in the system; that are accepted in a row
FOLDER = os.path.dirname(os.path.abspath(__file__))
# files whose names have their versions
VENDORED = [f'/vendor/{name}' for name in sorted(os.listdir(f'{FOLDER}/vendor')) if name.endswith('.js')]
PAGE = {'/': 'text/html', '/page.css': 'text/css', **dict.fromkeys(('/page.js', *VENDORED), 'text/javascript')}
PAGE_HEADERS = {'content-security-policy': "default-src 'none'; style-src 'self'; script-src 'self'; "
                                           "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
                                           "frame-ancestors 'none'; require-trusted-types-for 'script'; "
                                           "trusted-types dompurify",
                'x-content-type-options': 'nosniff', 'referrer-policy': 'no-referrer', 'x-dns-prefetch-control': 'off'}


class Service:
    """
    What the app serves: thread, an `EngineThread`, and served, a `Served`, once they are loaded. load: a function that
    returns both, the thread started. cors_origin: origins whose pages may read the answers, with commas between them,
    or * for all; by default only the server's own page may. allowed_hosts: names of the server, likewise, besides
    localhost and all IP addresses. hosts: a pattern of all these names. error: what load raised. draining: are no more
    requests taken?
    """

    def __init__(self, load, api_key='', cors_origin='', allowed_hosts=''):
        self.load, self.api_key = load, api_key
        self.keys = [api_key.encode('utf-8', 'surrogateescape'), api_key.encode('latin-1', 'backslashreplace')]
        self.origins = [origin.strip().rstrip('/') for origin in cors_origin.split(',') if origin.strip()]
        for origin in self.origins:
            if not re.fullmatch(r'\*|null|[\w.+-]+://[^/\s]+', origin):
                raise ValueError(f"cors_origin must be origins such as http://localhost:3000, or *, not {origin!r}")
        names = [re.escape(name.strip().rpartition('://')[2].partition(':')[0]).replace(r'\*', '.*')
                 for name in ['localhost', '*.localhost', *{*self.origins} - {'*'}, *allowed_hosts.split(',')] if name]
        self.hosts = re.compile(rf'([\d.]+|\[[\da-f:.]+\]|{"|".join(names)})\.?(:\d*)?', re.IGNORECASE)
        self.thread = self.served = self.bell = self.error = None
        self.draining, self.preparing = False, set()  # preparing: tasks before `submit`
        self.threads_for = {kind: ThreadPoolExecutor(n, kind) for kind, n in THREADS.items()}
        self.waiting = Counter()  # {kind: requests that wait for a thread}

    def start_loading(self, loaded):
        """Load in a thread of its own, while /health answers; then call `loaded`, if there is a model."""
        def load():
            try:
                thread, self.served = self.load()
                self.thread = thread
            except BaseException as e:
                self.error = e
            else:
                loaded()
        threading.Thread(target=load, name='load', daemon=True).start()

    def check_loaded(self):
        """APIError 503 unless there is a model whose engine runs. It may be draining."""
        if self.thread is None:
            raise APIError(503, "the model is being loaded: try again later", code='loading')
        if self.thread.dead:
            raise APIError(503, "the engine has ended, and the server ends too: it must be started again", code='dead')

    def check_ready(self):
        """APIError 503 unless requests are taken."""
        if self.draining:
            raise APIError(503, "the server is stopping: try again later", code='draining')
        self.check_loaded()

    def check_key(self, request):
        """APIError 401 unless the request has the key, where there is one."""
        scheme, _, given = request.headers.get('authorization', '').strip().partition(' ')
        given = given.strip().encode('latin-1') if scheme.lower() == 'bearer' else b''  # Starlette has decoded it so
        if self.api_key and not any(hmac.compare_digest(given, key) for key in self.keys):
            raise APIError(401, "the API key that came is wrong: send this server's" if given else
                           "this server needs its API key: send the header Authorization: Bearer KEY",
                           code='invalid_api_key', headers={'www-authenticate': 'Bearer'})

    def check_names(self, request):
        """APIError 403 if a request names another server (DNS rebinding), or comes from a page of another origin."""
        host, origin = request.headers.get('host', ''), request.headers.get('origin', '')
        if host and not self.hosts.fullmatch(host):
            header, value, setting = 'Host', host, 'allowed_hosts'
        elif not is_own_page(request) and not {'*', origin} & {*self.origins}:
            header, value, setting = 'Origin', origin, 'cors_origin'
        else:
            return
        raise APIError(403, f"{header} {value[:100]!r} is foreign here, and refused: if it is yours, start serve.py "
                            f"with --{setting}={value[:100]}", code=f'foreign_{header.lower()}')

    async def respond(self, endpoint, request):
        """The response of an `Endpoint` to a request."""
        if endpoint.key:
            self.check_key(request)
        if not self.api_key or endpoint.handler is cache:
            self.check_names(request)
        if endpoint.body is None:
            return await endpoint.handler(self, request)
        self.check_ready()
        self.preparing.add(task := asyncio.current_task())
        try:
            body = parsed(endpoint.body, await read(request), self.served.defaults)
            self.served.check_name(body.model)
            return await endpoint.handler(self, body)
        except asyncio.CancelledError:  # see `drain`
            self.check_ready()
            raise
        finally:
            self.preparing.discard(task)

    async def in_thread(self, kind, function):
        """
        What a function returns, called in a thread of this kind. APIError 429 if MOST_WAITING wait for one, or if none
        was free for PATIENCE.
        """
        late = APIError(429, f"too many requests wait for a thread ({kind}): try again later", code='queue_full')
        asked = time.monotonic()

        def in_time():
            if time.monotonic() > asked + PATIENCE:
                raise late
            return function()
        if self.waiting[kind] >= MOST_WAITING:
            raise late
        self.waiting[kind] += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.threads_for[kind], in_time)
        finally:
            self.waiting[kind] -= 1

    def submit(self, requests):
        """Submit all requests or none. APIError where the queue is full."""
        self.check_ready()
        n, most = sum(request.n for request in requests), self.thread.max_queue
        if n > most:
            raise invalid('n', f"this asks for {n:,} samples, prompts times n, and at most {most:,} may wait: ask for "
                               "fewer at a time")
        try:
            self.thread.submit(*requests)
        except QueueFull as e:
            raise APIError(429, str(e), code='queue_full') from None

    def end(self, completion):
        """The client has its answer, or is gone: its requests that still run are aborted."""
        if not completion.done or completion.error:
            for request in completion.requests:
                self.thread.abort(request.id)

    async def drain(self, seconds):
        """Take no more requests, let those that run finish within this time, and abort the others."""
        self.draining = True
        for task in self.preparing:
            task.cancel()
        if self.thread is not None:
            await asyncio.to_thread(self.thread.drain, seconds)


def is_own_page(request):
    """Is the Origin of a request absent, the server's own, as the Host names it, or a port of this machine?"""
    origin = request.headers.get('origin', '')
    name = origin.partition('://')[2]
    return not origin or name == request.headers.get('host', '') or re.fullmatch(THIS_MACHINE, name, re.IGNORECASE)


async def read(request):
    """The bytes of a request's body. APIError 413 if they are more than MAX_BODY, 415 if they are compressed."""
    if (encoding := request.headers.get('content-encoding', '').strip().lower()) not in ('', 'identity'):
        raise APIError(415, f"the body is encoded ({encoding[:40]!r}): send plain JSON, without Content-Encoding")
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY:
            raise APIError(413, f"the body has more than {MAX_BODY:,} bytes, the most that this server reads",
                           headers={'connection': 'close'})
    return bytes(data)


def make_app(service, loaded=lambda: None):
    """
    The ASGI app of a `Service`. It begins to load the model when it starts, and stops the engine when it ends. loaded:
    called when the model is loaded.
    """
    @asynccontextmanager
    async def lifespan(app):
        service.bell = Bell(asyncio.get_running_loop())
        service.start_loading(loaded)
        yield
        for threads in service.threads_for.values():
            threads.shutdown(wait=False, cancel_futures=True)
        if service.thread is not None:
            await asyncio.to_thread(service.thread.stop)

    routes = [Route(endpoint.path.replace('{id}', '{id:path}'), partial(service.respond, endpoint),
                    methods=[endpoint.method]) for endpoint in ENDPOINTS]
    handlers = {APIError: error_answer, HTTPException: http_error, ClientDisconnect: no_answer, Exception: server_error}
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False  # it would send the client to the Host that it named
    if service.origins:
        app = CORSMiddleware(app, allow_origins=service.origins, allow_methods=['GET', 'POST'], allow_headers=['*'],
                             expose_headers=['retry-after', 'x-request-id'],
                             # asked for before a page of a public site may reach a private address
                             allow_private_network='*' not in service.origins)
    return app


async def error_answer(request, e):
    return JSON(e.json(), e.status, {'retry-after': '2'} if e.status in (429, 503) else e.headers)


async def http_error(request, e):
    """An address that does not exist, or does with another method."""
    path = request.scope['path'][:100]  # request.url reads the Host, which may be none
    message = (f"this server does not answer {request.method} {path}: GET /openapi.json lists what it answers; "
               "OpenAI's addresses begin with /v1")
    return JSON(APIError(e.status_code, message).json(), e.status_code, e.headers)


async def server_error(request, e):
    """A bug. Starlette raises the exception again: uvicorn logs its traceback, and ends the connection."""
    error = APIError(500, f"the server failed with {type(e).__name__}: its log says where")
    return JSON(error.json(), 500, {'connection': 'close'})


async def no_answer(request, e):
    """The client went away before its body was complete."""
    return Response(status_code=400)


async def completions(service, body):
    """Continue prompts"""
    long = sum(map(len, body.prompt)) > LONG_TEXT or body.forms
    return await generate(service, body, 'cmpl-', Completion, 'tokens' if long else None)


async def chat(service, body):
    """Answer in a conversation"""
    return await generate(service, body, 'chatcmpl-', ChatCompletion, 'template')


async def responses(service, body):
    """Answer an input"""
    try:
        return await generate(service, body, 'resp_', ModelResponse, 'template')
    except APIError as e:
        raise renamed(e) from None


async def generate(service, body, prefix, kind, work=None):
    """Submit a body's requests. Returns the `Answer`. kind: of its completion. work: of the thread that makes them."""
    id, mailbox = f'{prefix}{secrets.token_hex(12)}', Mailbox(service.bell, listening=body.stream)

    def make():
        return kind(id, body, service.served, requests_of(body, service.served, id, mailbox.put))
    completion = await service.in_thread(work, make) if work else make()
    service.submit(completion.requests)
    return Answer(service, completion, mailbox)


async def models(service, request):
    """The model that is served"""
    service.check_loaded()
    served, name = service.served, request.path_params.get('id')
    model = {'id': served.name, 'object': 'model', 'created': served.created, 'owned_by': 'nanogpt',
             'max_model_len': served.max_tokens, 'chat': served.tokenizer.chat_template is not None,
             'sampling_defaults': served.defaults}
    if name is None:
        return JSON({'object': 'list', 'data': [model]})
    served.check_name(name or '/')
    return JSON(model)


async def tokenizer_info(service, request):
    """The tokenizer_config.json of the tokenizer"""
    service.check_loaded()
    _, config = await service.in_thread('tokens', partial(huggingface_tokenizer, service.served.tokenizer))
    return Response(json.dumps(config), media_type='application/json')  # its numbers may be too large for orjson


async def health(service, request):
    """Does the server take requests?"""
    service.check_ready()
    return JSON({'status': 'ok'})


async def metrics(service, request):
    """Counters and histograms for Prometheus"""
    service.check_loaded()
    return Response(generate_latest(service.thread.stats.registry), headers={'content-type': FORMAT})


async def tokenize(service, body):
    """The tokens of a text or of a conversation"""
    served = service.served
    if (body.messages is None) == (body.prompt is None):
        raise invalid('prompt', "prompt or messages: the body must have one of them")

    def answer():
        tokens = served.conversation(body) if body.messages else served.encode(body.prompt, body.add_special_tokens)
        names = [name_of_token(served.token_bytes[token]) for token in tokens] if body.return_token_strs else None
        return JSON({'tokens': tokens, 'count': len(tokens), 'max_model_len': served.max_tokens, 'token_strs': names})
    return await service.in_thread('tokens' if body.messages is None else 'template', answer)


async def detokenize(service, body):
    """The text of tokens"""
    def answer():
        service.served.check_ids('tokens', body.tokens)
        return JSON({'prompt': service.served.tokenizer.decode(body.tokens)})
    return await service.in_thread('tokens', answer)


async def cache(service, request):
    """The pool of blocks and the requests, as the web page shows them"""
    service.check_loaded()
    state, local = service.thread.state(), request.client is not None and request.client.host in LOCAL
    proxied = any(name.startswith(('forwarded', 'via', 'x-real-ip', 'x-forwarded')) for name in request.headers)
    strange = not is_own_page(request) and request.headers['origin'] not in service.origins  # * let it in
    if not service.api_key and (strange or proxied or not local):  # texts of prompts need the key or this machine
        state = state | {'blocks': [block | {'text': ''} for block in state['blocks']]}
    return JSON(state, headers={'cache-control': 'no-store'})


async def description(service, request):
    """This description"""
    return JSON(openapi(ENDPOINTS, bool(service.api_key)))


async def page(service, request):
    """The web page, and the files that it loads"""
    path = request.scope['path']
    age = 'public, max-age=31536000, immutable' if path in VENDORED else 'no-cache'
    return FileResponse(FOLDER + ('/page.html' if path == '/' else path), media_type=PAGE[path],
                        headers=PAGE_HEADERS | {'cache-control': age})


ENDPOINTS = [
    Endpoint('POST', '/v1/completions', completions, body=CompletionBody),
    Endpoint('POST', '/v1/chat/completions', chat, body=ChatBody),
    Endpoint('POST', '/v1/responses', responses, body=ResponseBody),
    Endpoint('GET', '/v1/models', models),
    Endpoint('GET', '/v1/models/{id}', models),
    Endpoint('POST', '/tokenize', tokenize, body=TokenizeBody),
    Endpoint('POST', '/detokenize', detokenize, body=DetokenizeBody),
    Endpoint('GET', '/tokenizer_info', tokenizer_info),
    Endpoint('GET', '/cache', cache),
    Endpoint('GET', '/health', health, key=False),
    Endpoint('GET', '/metrics', metrics, 'text/plain', key=False),
    Endpoint('GET', '/openapi.json', description, key=False),
    *(Endpoint('GET', path, page, kind, key=False) for path, kind in PAGE.items()),
]


class Process(uvicorn.Server):
    """uvicorn, but for how it ends: the first SIGTERM or SIGINT drains within drain_seconds, a second ends at once."""

    def __init__(self, config, service, drain_seconds):
        super().__init__(config)
        self.service, self.drain_seconds = service, drain_seconds
        self.loop = self.drainer = None

    async def startup(self, sockets=None):
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        sockets[0].listen(BACKLOG)  # asyncio has set it to ACCEPTED, which is also how many it accepts in a row

    async def on_tick(self, counter):
        thread, error = self.service.thread, self.service.error
        self.should_exit |= error is not None or thread is not None and thread.dead
        if counter % 10 == 0:  # of ticks of 0.1 s
            for connection in [*self.server_state.connections]:
                connection.check()
        return await super().on_tick(counter)

    def handle_exit(self, sig, frame):
        if self.service.draining or self.service.error or self.loop is None:
            os._exit(128 + sig)
        self.service.draining = True
        self.drainer = asyncio.run_coroutine_threadsafe(self.drain(), self.loop)

    async def drain(self):
        print(f"stopping: requests that run have {self.drain_seconds:g} s to finish; a second signal ends at once",
              file=sys.stderr)
        try:
            await self.service.drain(self.drain_seconds)
        finally:
            self.should_exit = True


def say_what_is_served(served, address):
    chat = ", /v1/chat/completions, /v1/responses" * (served.tokenizer.chat_template is not None)
    print(f"the API of {served.name!r} at {address}v1: /v1/completions{chat}\n"
          f"ready in {time.monotonic() - BEGAN:.1f} s", file=sys.stderr)


def read_key(given=None):
    """The key that is given, or API_KEY in the environment; FILE:path is read. A ValueError does not show the key."""
    key = named = os.environ.get('API_KEY', '') if given is None else given
    if named.startswith('FILE:'):
        with open(os.path.expanduser(named[5:]), encoding='utf-8', errors='surrogateescape') as f:
            key = f.read().strip()
    if named and key.split() != [key]:
        raise ValueError("the API key, or what is in its file, must be one word, without blanks")
    if named and given is None:
        print("requests need the API key that API_KEY in the environment says", file=sys.stderr)
    return key


def listen(host, port):
    """A listening socket. port: 0 takes any that is free. OSError if the port cannot be had."""
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    try:
        both = host == '::' and socket.has_dualstack_ipv6()  # all addresses, those of IPv4 too
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except OSError as e:
        another = '--port' if e.errno in (errno.EADDRINUSE, errno.EACCES) else '--host, an address of this machine'
        raise OSError(f"port {port} of {host} cannot be had ({e.strerror or e}): choose another {another}") from e
    # asyncio sets this option only on sockets that it makes itself. Without it the system sends the body of a response
    # only after the client has acknowledged the headers, about 40 ms later.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def run(service, host, port, drain_seconds):
    """Serve until a signal comes. OSError without the port; what loading raised; SystemExit if the engine has ended."""
    listener = listen(host, port)
    name = f'[{host}]' if ':' in host else host
    address = f'http://{name}:{listener.getsockname()[1]}/'
    print(f"the page: {address}   (the model is being loaded)", file=sys.stderr)
    if not service.api_key and host not in ('127.0.0.1', 'localhost', '::1'):
        print("there is no API key: whoever reaches this address can use the server (--api_key=)", file=sys.stderr)
    app = make_app(service, lambda: say_what_is_served(service.served, address))
    config = uvicorn.Config(app, log_level='error', access_log=False, lifespan='on', ws='none', server_header=False,
                            http=Connection, backlog=ACCEPTED, timeout_graceful_shutdown=CLOSING,
                            timeout_keep_alive=IDLE, proxy_headers=False)
    Process(config, service, drain_seconds).run([listener])
    if service.error is not None:
        raise service.error
    if service.thread is not None and service.thread.dead:
        sys.exit("serve.py: error: the engine ended by itself: what stands above says why")
