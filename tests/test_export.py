"""export.py, the script, and the folders that it reads."""
import shutil

import pytest
from conftest import run
from example_models import HARD, gpt

import checkpoint
import formats
import model as plain_model
from tokenizer import CharTokenizer


@pytest.fixture
def folder(repo, trained):
    """A copy of the trained run, with the code."""
    shutil.copytree(trained / 'out', repo / 'out')
    return repo


def test_the_script_exports_the_newest_checkpoint_for_hugging_face(folder):
    pytest.importorskip('transformers', reason="transformers is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    done = run(folder, 'export.py')
    assert done.returncode == 0 and not done.stdout, done.stderr
    assert 'out/ckpt.pt: iteration 20' in done.stderr and 'vllm serve out/hf' in done.stderr
    theirs, tokenizer = (auto.from_pretrained(folder / 'out' / 'hf') for auto in (AutoModelForCausalLM, AutoTokenizer))
    ids = theirs.generate(**tokenizer('The ', return_tensors='pt'), do_sample=False, max_new_tokens=10, pad_token_id=0)
    greedy = ('--device=cpu', '--num_samples=1', '--temperature=0', '--max_new_tokens=10', '--start=The ')
    ours = run(folder, 'sample.py', *greedy).stdout
    assert tokenizer.decode(ids[0]) + '\n' == ours
    back = run(folder, 'sample.py', '--init_from=out/hf', *greedy)
    assert back.stdout == ours and 'out/hf, ' in back.stderr  # with the characters of its meta.json


def test_a_folder_without_a_tokenizer_is_refused_where_text_is_needed(repo, monkeypatch):
    formats.to_huggingface(gpt(**HARD), repo / 'hf')
    # GPT-2's, as many
    monkeypatch.setattr(checkpoint.tokenizers, 'from_state', lambda state: CharTokenizer(map(chr, range(50257))))
    with pytest.raises(ValueError, match='50257 tokens, but the model a vocab_size of 37'):
        checkpoint.load_model(str(repo / 'hf'), '', plain_model)


def test_the_script_exports_for_llama_cpp_also_from_a_folder(folder):
    pytest.importorskip('gguf', reason="gguf is not installed")
    assert run(folder, 'export.py', '--path=hf').returncode == 0
    for settings, path in (([], 'out/model.gguf'), (['--init_from=hf'], 'out-hf/model.gguf')):
        done = run(folder, 'export.py', '--to=gguf', *settings)
        assert done.returncode == 0 and not done.stdout, done.stderr
        for line in (f'llama-server -m {path}', 'tanh', 'the model ends at 16'):
            assert line in done.stderr
    assert (folder / 'out' / 'model.gguf').read_bytes() == (folder / 'out-hf' / 'model.gguf').read_bytes()
