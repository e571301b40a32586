"""serve.py as a user runs it: the address it prints, an answer, the end, and one line for each mistake."""
import os
import signal
import socket
import subprocess
import sys

from conftest import SERVING, needs

needs(*SERVING)

import httpx
import numpy as np
import torch
from conftest import ENVIRONMENT, TIMEOUT, run
from example_models import LLAMA, chat_tokenizer
from serving_process import started

import checkpoint
import formats
import model as plain_model
from engine import Engine

SMALL = ('--port=0', '--decoder=eager', '--n_blocks=16', '--page_size=4', '--device=cpu')


def test_serves_the_newest_run(trained):
    """With the tokens of the model without a cache, and of the engine for a seed. It says where, and shows no key."""
    with started(trained, 'serve.py', *SMALL, '--host=localhost', '--api_key=geheim7') as (process, lines, address):
        assert address.startswith('http://localhost:')
        assert f"the API of 'out' at {address}v1: /v1/completions\n" in lines and 'no API key' not in ''.join(lines)
        with httpx.Client(base_url=address, timeout=60, headers={'authorization': 'bearer geheim7'}) as client:
            (model,) = client.get('/v1/models').json()['data']
            assert (model['id'], model['max_model_len']) == ('out', 16)
            body = {'prompt': 'for', 'max_tokens': 13, 'temperature': 0, 'echo': True, 'logprobs': 0}
            (text, exact), (drawn, _) = [(choice['text'], choice['logprobs']['token_logprobs'][1:]) for choice, in (
                client.post('/v1/completions', json=body | how).json()['choices']
                for how in (dict(), dict(temperature=0.8, top_k=20, seed=7)))]
            assert '<title>' in client.get('/').text and client.get('/cache').json()['n_blocks'] == 16
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 0
        assert 'geheim7' not in ''.join(lines) + process.stderr.read() + process.stdout.read()
    model, tokenizer, _ = checkpoint.load_model('resume', str(trained / 'out'), plain_model)
    tokens = model.generate(torch.tensor([tokenizer.encode('for')]), 13, temperature=0)[0].tolist()
    assert text == tokenizer.decode(tokens)
    tokens, = Engine(model).generate([tokenizer.encode('for')], 13, seed=7, temperature=0.8, top_k=20)
    assert drawn == tokenizer.decode(tokens)
    with started(trained, 'serve.py', *SMALL, '--host=[0.0.0.0]', '--kv_bits=8') as (_, lines, address):
        assert 'there is no API key: whoever reaches this address can use the server' in ''.join(lines)
        choice, = httpx.post(f'{address}v1/completions', json=body | dict(prompt=text, max_tokens=0)).json()['choices']
    rounded = choice['logprobs']['token_logprobs'][1:]
    assert rounded != exact and np.allclose(rounded, exact, atol=0.05)


def test_serves_a_chat_model_whose_file_is_cut_meanwhile(trained, tmp_path):
    """It says what it serves and how draws begin. A file that is written anew in place ends nothing."""
    torch.manual_seed(0)
    formats.to_huggingface(plain_model.GPT(plain_model.GPTConfig(**LLAMA)), tmp_path, chat_tokenizer())
    (tmp_path / 'generation_config.json').write_text('{"temperature": 0.5, "top_k": 2, "eos_token_id": 2}')
    with started(trained, 'serve.py', *SMALL, f'--init_from={tmp_path}', '--name=someone/toy') as (_, lines, address):
        assert any('/v1/completions, /v1/chat/completions' in line for line in lines)
        assert any(line.startswith('sampling defaults: temperature 0.5, top_k 2 ') for line in lines)
        model = httpx.get(f'{address}v1/models/someone/toy').json()
        assert model['sampling_defaults'] == {'temperature': 0.5, 'top_k': 2} and model['chat']
        assert model['max_model_len'] == 16 * 4 < LLAMA['block_size']
        os.truncate(tmp_path / 'model.safetensors', 1000)
        body = dict(messages=[dict(role='user', content='Hello')], max_tokens=4)
        assert httpx.post(f'{address}v1/chat/completions', json=body, timeout=60).status_code == 200


def test_interrupted_while_it_is_loaded(trained):
    """Ctrl-C in the middle of the imports: no traceback of them."""
    process = subprocess.Popen([sys.executable, '-X', 'importtime', 'serve.py'], cwd=trained, stderr=subprocess.PIPE,
                               text=True, env=ENVIRONMENT)
    next(line for line in process.stderr if line.endswith(' numpy.version\n'))
    process.send_signal(signal.SIGINT)
    assert 'Traceback' not in process.stderr.read() and process.wait(TIMEOUT) == -signal.SIGINT
    process.stderr.close()


def test_a_port_in_use(trained):
    with socket.create_server(('127.0.0.1', 0)) as taken:
        done = run(trained, 'serve.py', *SMALL[1:], f'--port={taken.getsockname()[1]}')
    assert done.returncode == 2 and 'choose another --port' in done.stderr.splitlines()[-1]
