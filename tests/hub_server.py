"""A small server that speaks the API of the Hugging Face hub, as far as a download of a repository needs it."""
import hashlib
import json
import re
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class Hub(ThreadingHTTPServer):
    """
    repositories: {owner/name: {revision: {path: bytes}}}. gated: names of those that need a token. asked: [(method,
    path, the header Range)]. cut: bytes of a file after which the next answer ends, or None.
    """

    def __init__(self, repositories, gated=()):
        super().__init__(('127.0.0.1', 0), Handler)
        self.repositories, self.gated, self.asked, self.cut = repositories, gated, [], None
        self.address = f'http://127.0.0.1:{self.server_port}'


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def do_GET(self):
        hub, path = self.server, self.path.partition('?')[0]
        hub.asked.append((self.command, path, self.headers.get('Range')))
        name, of_api, revision, file = re.fullmatch(
            r'(?:/api/models)?/([^/]+/[^/]+)/(revision|tree|resolve)/([^/]+)/?(.*)', path).groups()
        commits = hub.repositories.get(name)
        if commits is None:
            return self.error(401, 'RepoNotFound')
        commit = {sha_of(each): each for each in commits}.get(revision, revision)
        if commit not in commits:
            return self.error(404, 'RevisionNotFound')
        if name in hub.gated and of_api != 'revision':
            return self.error(401, 'GatedRepo')
        files, sha = commits[commit], sha_of(commit)
        if of_api == 'revision':
            return self.answer(json.dumps(dict(id=name, sha=sha, siblings=[dict(rfilename=p) for p in files])).encode())
        if of_api == 'tree':
            return self.answer(json.dumps([dict(type='file', path=p, size=len(content), oid=etag_of(content))
                                           for p, content in files.items()]).encode())
        if file not in files:
            return self.error(404, 'EntryNotFound')
        self.answer(files[file], {'ETag': f'"{etag_of(files[file])}"', 'X-Repo-Commit': sha})

    do_HEAD = do_GET

    def error(self, status, code):
        self.answer(b'', {'X-Error-Code': code, 'X-Error-Message': code}, status)

    def answer(self, content, headers=(), status=200):
        hub, first = self.server, int((self.headers.get('Range') or 'bytes=0-')[6:].partition('-')[0])
        self.send_response(206 if first else status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        if first:
            self.send_header('Content-Range', f'bytes {first}-{len(content) - 1}/{len(content)}')
        self.send_header('Content-Length', str(len(content) - first))
        self.end_headers()
        if self.command == 'HEAD':
            return
        if hub.cut is not None and len(content) > hub.cut:
            content, hub.cut, self.close_connection = content[:hub.cut], None, True
        self.wfile.write(content[first:])

    def log_message(self, *args):
        pass


def sha_of(commit):
    return hashlib.sha1(commit.encode()).hexdigest()


def etag_of(content):
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serving(repositories, gated=()):
    """A `Hub` that runs meanwhile."""
    hub = Hub(repositories, gated)
    thread = Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
