"""export.py, the script: where it writes the newest run, what it says, and that scripts take what it has written."""
import shutil

import pytest
from conftest import run


def test_the_newest_checkpoint_goes_to_both_formats_and_comes_back(repo, trained):
    pytest.importorskip('gguf', reason="gguf is not installed")
    shutil.copytree(trained / 'out', repo / 'out')
    done = run(repo, 'export.py')
    assert done.returncode == 0 and not done.stdout, done.stderr
    assert 'out/ckpt.pt: iteration 20' in done.stderr and 'vllm serve out/hf' in done.stderr
    for settings, path in (([], 'out/model.gguf'), (['--init_from=out/hf'], 'out-hf/model.gguf')):
        done = run(repo, 'export.py', '--to=gguf', *settings)
        assert done.returncode == 0 and not done.stdout, done.stderr
        for line in (f'llama-server -m {path}', 'see docs/SERVING.md'):
            assert line in done.stderr
    assert (repo / 'out' / 'model.gguf').read_bytes() == (repo / 'out-hf' / 'model.gguf').read_bytes()
    greedy = ('--device=cpu', '--num_samples=1', '--temperature=0', '--max_new_tokens=10', '--start=The ')
    ours, back = (run(repo, 'sample.py', *greedy, *more) for more in ([], ['--init_from=out/hf']))
    assert back.stdout == ours.stdout != '' and 'out/hf, ' in back.stderr  # with the characters of its meta.json
