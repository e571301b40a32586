"""serve.py as a user runs it: the address it prints, an answer, the end, and one line for each mistake."""
import signal
import socket

from conftest import SERVING, needs

needs(*SERVING)

import httpx
from conftest import TIMEOUT, run, start

import checkpoint
import generation
import model as plain_model

SMALL = ('--port=0', '--decoder=eager', '--n_blocks=16', '--page_size=4', '--device=cpu')


def test_serves_the_newest_run(trained):
    """Greedy, as `generate` continues the prompt; SIGTERM ends it with exit code 0."""
    process = start(trained, 'serve.py', *SMALL)
    try:
        lines = iter(process.stderr.readline, '')
        address = next(line.split()[2] for line in lines if line.startswith('the page:'))
        with httpx.Client(base_url=address, timeout=60) as client:
            while client.get('/health').status_code == 503:
                pass
            (served,) = client.get('/v1/models').json()['data']
            assert (served['id'], served['max_model_len']) == ('out', 16)
            body = {'prompt': 'for', 'max_tokens': 13, 'temperature': 0, 'echo': True}
            text = client.post('/v1/completions', json=body).json()['choices'][0]['text']
            assert '<title>' in client.get('/').text and client.get('/cache').json()['n_blocks'] == 16
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 0
    finally:
        process.kill()
        process.communicate()
    model, tokenizer, _ = checkpoint.load_model('resume', str(trained / 'out'), plain_model)
    (tokens,) = generation.generate(model, [tokenizer.encode('for')], 13, temperature=0)
    assert text == tokenizer.decode(tokens)


def test_a_port_in_use(trained):
    with socket.create_server(('127.0.0.1', 0)) as taken:
        done = run(trained, 'serve.py', *SMALL[1:], f'--port={taken.getsockname()[1]}')
    assert done.returncode == 2 and 'choose another --port' in done.stderr.splitlines()[-1]
