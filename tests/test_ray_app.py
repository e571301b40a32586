"""Two replicas behind Ray Serve give the same answers, and one that is killed loses no later request."""
import os
import socket

import pytest
from conftest import SERVING, needs

needs(*SERVING, 'ray')

import httpx
import ray
from conftest import ROOT

BODY = {'prompt': 'for', 'max_tokens': 12, 'temperature': 1.0}
KEY = {'authorization': 'Bearer 0123'}  # a text, though it looks like a number


@pytest.fixture(scope='module')
def address(trained):
    """Of two replicas, each on half a core."""
    from ray import serve

    from serving.ray_app import app
    with socket.create_server(('127.0.0.1', 0)) as free:
        port = free.getsockname()[1]
    paths = os.pathsep.join([ROOT, *filter(None, [os.environ.get('PYTHONPATH')])])
    ray.init(num_cpus=2, include_dashboard=False,
             runtime_env={'env_vars': {'PYTHONPATH': paths, 'OMP_NUM_THREADS': '1'}})
    serve.start(http_options={'host': '127.0.0.1', 'port': port})
    serve.run(app({'num_replicas': '2', 'num_cpus': '0.5', 'decoder': 'eager', 'n_blocks': '32', 'page_size': '4',
                   'out_dir': str(trained / 'out'), 'api_key': '0123'}))
    yield f'http://127.0.0.1:{port}'
    serve.shutdown()
    ray.shutdown()


def answer(address, seed):
    response = httpx.post(f'{address}/v1/completions', json=BODY | {'seed': seed}, timeout=60, headers=KEY)
    assert response.status_code == 200, response.text
    return response.json()['choices'][0]['text']


def test_replicas_are_interchangeable(address):
    """Each seed is asked for several times, so that both replicas answer; then one of them is killed."""
    expected = {seed: answer(address, seed) for seed in range(4)}
    assert len(set(expected.values())) == 4
    for _ in range(4):
        assert {seed: answer(address, seed) for seed in range(4)} == expected

    replicas = [actor for actor in ray.util.list_named_actors(all_namespaces=True) if 'nanogpt' in actor['name']]
    assert len(replicas) == 2
    pid = ray.get(ray.get_actor(**replicas[0]).__ray_call__.remote(lambda actor: os.getpid()))
    os.kill(pid, 9)
    for _ in range(4):
        assert {seed: answer(address, seed) for seed in range(4)} == expected


def test_a_key_that_looks_like_a_number(address):
    assert httpx.get(f'{address}/v1/models', timeout=60).status_code == 401
    assert httpx.get(f'{address}/v1/models', timeout=60, headers=KEY).json()['data'][0]['id'] == 'out'


def test_streams_go_through_the_router(address):
    body = BODY | {'seed': 1, 'stream': True}
    with httpx.stream('POST', f'{address}/v1/completions', json=body, timeout=60, headers=KEY) as response:
        data = response.read()
    assert data.startswith(b'data: {') and data.endswith(b'data: [DONE]\n\n')
