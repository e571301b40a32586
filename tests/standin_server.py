"""
A completions server with no model, which streams one letter a token: run by itself it takes llama-server's arguments.

    python tests/standin_server.py -m FILE --port 8080 -np 4 -c 1024 --threads 2
"""
import asyncio
import json
import sys

BROKEN, SHORT = 1, 2  # first tokens of prompts that are answered with an error, and with too few tokens


class StandIn:
    """
    bodies: the requests, parsed, in the order in which they came. most: so many were answered at once. gone: prompts
    whose client went away. gate: answers wait for this event before their first token, and `waiting` counts them.
    """

    def __init__(self):
        self.bodies, self.gone, self.running, self.most = [], [], 0, 0
        self.gate, self.waiting, self.arrived = asyncio.Event(), 0, asyncio.Event()
        self.gate.set()

    async def start(self, port=0):
        self.server = await asyncio.start_server(self.answer, '127.0.0.1', port)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    def body(self, ask):
        return json.dumps({'prompt': ask.prompt, 'max_tokens': ask.n_new}).encode()

    async def answer(self, reader, writer):
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            head = await reader.readuntil(b'\r\n\r\n')
            if head.startswith(b'GET'):
                writer.write(b'HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{}')
            else:
                length = next(int(line.split(b':')[1]) for line in head.splitlines() if line.startswith(b'content-len'))
                await self.stream(json.loads(await reader.readexactly(length)), reader, writer)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            self.running -= 1
            writer.close()

    async def stream(self, body, reader, writer):
        self.bodies.append(body)
        prompt, n = body['prompt'], body['max_tokens']
        if prompt[0] == BROKEN:
            writer.write(b'HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n{"error": {"message": "broken"}}')
            return
        writer.write(b'HTTP/1.1 200 OK\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n')
        self.waiting += 1
        self.arrived.set()
        if not self.gate.is_set():  # until it opens, or the client goes away
            end, opened = asyncio.ensure_future(reader.read()), asyncio.ensure_future(self.gate.wait())
            done, _ = await asyncio.wait({end, opened}, return_when=asyncio.FIRST_COMPLETED)
            if end in done:
                self.gone.append(prompt)
                opened.cancel()
                return
            end.cancel()
        n -= prompt[0] == SHORT
        for i in range(n):
            send(writer, {'choices': [{'text': 'a', 'token_ids': [prompt[-1] + i]}]})
            await writer.drain()
        send(writer, {'choices': [], 'usage': {'completion_tokens': n}})
        writer.write(b'e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n')


def send(writer, fields):
    event = b'data: ' + json.dumps(fields).encode() + b'\n\n'
    writer.write(b'%x\r\n%s\r\n' % (len(event), event))


async def serve(port):
    await (await StandIn().start(port)).server.serve_forever()


if __name__ == '__main__':
    arguments = dict(zip(sys.argv[1:], sys.argv[2:]))
    open(arguments['-m'], 'rb').close()  # the file of the model is there
    asyncio.run(serve(int(arguments['--port'])))
