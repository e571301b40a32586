"""
Two small servers: of files, parts of which can be asked for, and of the API of the Hugging Face hub, as far as a
download of a repository needs it.
"""
import hashlib
import json
import re
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class Server(ThreadingHTTPServer):
    """
    content: {path: bytes}; of a hub {owner/name: {revision: {path: bytes}}}. gated: names of those that need a token.
    asked: [(path, the header Range)]. cut: bytes of a file after which an answer ends, or None. hashes: {path: what the
    header X-Linked-ETag names}. has_ranges, has_length: does it give parts, does it say how many bytes there are?
    """

    def __init__(self, handler, content, gated=()):
        super().__init__(('127.0.0.1', 0), handler)
        self.content, self.gated, self.hashes, self.asked = content, gated, {}, []
        self.cut, self.has_ranges, self.has_length = None, True, True
        self.address = f'http://127.0.0.1:{self.server_port}'


class Files(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def do_GET(self):
        server, content = self.server, self.server.content.get(self.path)
        server.asked.append((self.path, self.headers.get('Range')))
        if content is None:
            return self.answer(b'', status=404)
        self.answer(content, {'X-Linked-ETag': f'"{server.hashes[self.path]}"'} if self.path in server.hashes else {})

    def answer(self, content, headers=(), status=200):
        """The part of content that is asked for."""
        server, asked = self.server, self.headers.get('Range')
        part, of = content, f'*/{len(content)}'
        if asked and status == 200 and server.has_ranges:
            first, last = (int(number) if number else len(content) - 1 for number in asked[6:].split('-'))
            part, status = content[first:last + 1], 206 if first < len(content) else 416
            of = f'{first}-{last}/{len(content)}' if part else of
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        if status in (206, 416):
            self.send_header('Content-Range', of)
        if server.has_length:
            self.send_header('Content-Length', str(len(part)))
        self.end_headers()
        if self.command == 'GET':
            self.wfile.write(part[:server.cut])
            self.close_connection = len(part[:server.cut]) < len(part) or not server.has_length

    def log_message(self, *args):
        pass


class Hub(Files):
    def do_GET(self):
        hub, path = self.server, self.path.partition('?')[0]
        hub.asked.append((path, self.headers.get('Range')))
        name, of_api, revision, file = re.fullmatch(
            r'(?:/api/models)?/([^/]+/[^/]+)/(revision|tree|resolve)/([^/]+)/?(.*)', path).groups()
        commits = hub.content.get(name)
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


def sha_of(commit):
    return hashlib.sha1(commit.encode()).hexdigest()


def etag_of(content):
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serving(handler, content, gated=()):
    """A `Server` that runs meanwhile."""
    server = Server(handler, content, gated)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
