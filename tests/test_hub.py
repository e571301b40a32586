"""formats/hub.py, and the scripts with a model's name on the hub, against a server that speaks the hub's API."""
import os

import pytest
from conftest import ROOT, run
from download_server import Hub, serving, sha_of
from example_models import LLAMA, TEXT, chat_tokenizer, gpt

import formats
from formats.hub import local_path
from tokenizer import GPT2

pytest.importorskip('huggingface_hub', reason="huggingface_hub is not installed")

WEIGHTS = os.urandom(2**20)
FILES = {'config.json': b'{"a": 1}', 'model.safetensors': WEIGHTS, 'tokenizer.json': b'{}', 'chat_template.jinja': b'x',
         'README.md': b'no', 'pytorch_model.bin': b'no', 'onnx/config.json': b'no', 'original/x.safetensors': b'no',
         'consolidated.safetensors': b'no'}
READ = ['chat_template.jinja', 'config.json', 'model.safetensors', 'tokenizer.json']
# it imports formats/hub.py and nothing else, because importing torch takes seconds
ASK = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location('hub', 'formats/hub.py')
hub = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hub)
try:
    print(hub.local_path(sys.argv[1]))
except ValueError as e:
    sys.exit(str(e))
"""


def environment(address, cache):
    return dict(HF_ENDPOINT=address, HF_HOME=str(cache), HF_HUB_DISABLE_TELEMETRY='1', HF_HUB_DISABLE_XET='1')


def ask(name, address, cache):
    """(the folder that formats/hub.py finds, or '', the last line of stderr), of a process of its own."""
    (cache / 'ask.py').write_text(ASK)
    done = run(ROOT, cache / 'ask.py', name, **environment(address, cache))
    return done.stdout.strip(), (done.stderr.strip().splitlines() or [''])[-1]


def files_of(folder):
    return {name: open(os.path.join(folder, name), 'rb').read() for name in sorted(os.listdir(folder))}


def test_it_is_downloaded_once_and_found_again_without_a_network(tmp_path):
    with serving(Hub, {'some/model': {'main': FILES}}) as hub:
        folder, _ = ask('some/model', hub.address, tmp_path)
        assert files_of(folder) == {name: FILES[name] for name in READ}
        hub.asked.clear()
        assert ask('some/model', hub.address, tmp_path)[0] == folder
        assert not [path for path, _ in hub.asked if '/resolve/' in path]
    assert ask('some/model', hub.address, tmp_path)[0] == folder
    folder, line = ask('other/model', hub.address, tmp_path)
    assert not folder and line.startswith('other/model could not be downloaded: the hub cannot be reached')


def test_a_download_that_was_cut_goes_on_where_it_ended(tmp_path):
    weights = os.urandom(2**20) * 16
    with serving(Hub, {'some/model': {'main': FILES | {'model.safetensors': weights}}}) as hub:
        hub.cut = 12 * 2**20  # it is written in parts of 10 MiB
        folder, _ = ask('some/model', hub.address, tmp_path)
        assert files_of(folder)['model.safetensors'] == weights and any(start for _, start in hub.asked)


def test_a_revision_behind_an_at_sign(tmp_path):
    with serving(Hub, {'some/model': {'main': FILES, 'v1.0': FILES | {'config.json': b'{"a": 0}'}}}) as hub:
        for name in ('some/model@v1.0', 'some/model@' + sha_of('v1.0')):
            assert files_of(ask(name, hub.address, tmp_path)[0])['config.json'] == b'{"a": 0}'
        assert files_of(ask('some/model', hub.address, tmp_path)[0])['config.json'] == b'{"a": 1}'
        folder, line = ask('some/model@v2', hub.address, tmp_path)
    assert not folder and 'some/model@v2 could not be downloaded: it has no such revision: leave' in line


@pytest.mark.parametrize('name, line', [
    ('some/thing', 'some/thing could not be downloaded: there is no such folder here and no such model on the hub; if'),
    ('some/gate', 'accept its terms on its page at https://huggingface.co, then run `hf auth login`'),
])
def test_what_cannot_be_had_is_one_line_that_says_what_to_do(tmp_path, name, line):
    with serving(Hub, {'some/gate': {'main': FILES}}, gated=['some/gate']) as hub:
        folder, said = ask(name, hub.address, tmp_path)
    assert not folder and line in said


def test_gpt2s_names_are_on_the_hub_and_their_tokenizer_is_gpt2s(tmp_path, monkeypatch):
    with serving(Hub, {'openai-community/gpt2-medium': {'main': FILES}}) as hub:
        folder, _ = ask('gpt2-medium', hub.address, tmp_path)
    assert files_of(folder)['model.safetensors'] == WEIGHTS
    monkeypatch.setattr(formats.pretrained, 'local_path', lambda name: folder)
    assert formats.files_of('gpt2-medium').tokenizer_state() == GPT2  # although the folder has a tokenizer.json
    assert formats.files_of(folder).tokenizer_state()['kind'] == 'json'


def test_what_is_on_the_disk_is_not_looked_for_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs('some/model')
    for name in ('some/model', 'resume', 'gpt3', './a/b', '/a/b', 'a/b/c', '../a', 'a/..', '~/a', 'a b/c', ''):
        assert local_path(name) == name


def test_a_script_takes_a_name_on_the_hub(tmp_path):
    formats.to_huggingface(gpt(**LLAMA), tmp_path / 'hf', chat_tokenizer(TEXT))
    settings = '--device=cpu', '--temperature=0', '--max_new_tokens=8', '--num_samples=1', '--start=Hé'
    with serving(Hub, {'some/model': {'main': files_of(tmp_path / 'hf')}}) as hub:
        done = run(ROOT, 'sample.py', '--init_from=some/model', *settings, **environment(hub.address, tmp_path / 'c'))
    expected = run(ROOT, 'sample.py', f"--init_from={tmp_path / 'hf'}", *settings)
    assert done.returncode == 0 and done.stdout == expected.stdout != '', done.stderr
