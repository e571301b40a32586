"""train.py trains models with other positions and windows, and a window is not lost when training goes on."""
import pytest
import torch
from conftest import run, sizes
from test_train import train

import checkpoint as checkpoints
from configurator import Settings
from model import GPT, GPTConfig
from positions import Positions
from training.checkpointer import settle_shape

SINKS = ('--position=rope', '--window=6', '--n_sink=2', '--n_kv_head=1')
KINDS = {
    'learned': dict(),
    'tanh': dict(gelu='tanh'),
    'rope': dict(position='rope', n_kv_head=1),
    'alibi': dict(position='alibi'),
    'none': dict(position='none', n_kv_head=2),
    'window': dict(position='rope', window=5),
    'alibi, window, sinks': dict(position='alibi', window=5, n_sink=2),
    'window, sinks': dict(position='rope', window=5, n_sink=2),
}


def tiny(seed=0, **more):
    torch.manual_seed(seed)
    args = dict(block_size=16, vocab_size=11, n_layer=3, n_head=4, n_embd=32, bias=False)
    return GPT(GPTConfig(**args | more))


def batch(seed=0):
    torch.manual_seed(seed)
    return torch.randint(11, (3, 16)), torch.randint(11, (3, 16))


def test_the_settings_are_in_the_checkpoint_and_a_resumed_run_takes_them_from_it_and_is_exact(repo):
    """With dropout on: 20 iterations in one go, and 10 + 10, the last ones without the settings."""
    assert train(repo, '--out_dir=a', *SINKS, '--rope_theta=500').returncode == 0
    assert train(repo, '--out_dir=b', '--max_iters=10', *SINKS, '--rope_theta=500').returncode == 0
    resumed = train(repo, '--out_dir=b', '--init_from=resume')
    assert resumed.returncode == 0 and 'stays' not in resumed.stdout, resumed.stderr + resumed.stdout
    a, b = (checkpoints.load(str(repo / d / 'ckpt.pt')) for d in 'ab')
    assert all(torch.equal(a['model'][k], b['model'][k]) for k in a['model'])
    expected = dict(position='rope', rope_theta=500.0, n_kv_head=1, window=6, n_sink=2, gelu='none')
    for saved in (a, b):
        assert expected.items() <= saved['model_args'].items() and expected.items() <= saved['config'].items()
    told = train(repo, '--out_dir=b', '--init_from=resume', '--max_iters=21', '--position=alibi', '--window=5',
                 '--n_kv_head=0', '--gelu=tanh', '--n_sink=2')
    for what in ('position stays rope', 'window stays 6', 'n_kv_head stays 1', 'gelu stays none'):
        assert told.stdout.count(what) == 1, told.stdout + told.stderr
    assert 'n_sink stays' not in told.stdout
    assert checkpoints.load(str(repo / 'b' / 'ckpt.pt'))['model_args']['window'] == 6
    short = train(repo, '--out_dir=b', '--init_from=resume', '--max_iters=30', '--block_size=8')
    assert short.returncode == 2 and 'Traceback' not in short.stderr
    assert short.stderr.strip().splitlines()[-1] == (
        "train.py: error: block_size 8 must be more than what the model's tokens see, a window of 6 and 2 sinks: set "
        "it to 16, for example")
    cut = train(repo, '--out_dir=b', '--init_from=resume', '--max_iters=23', '--block_size=9', '--eval_interval=1')
    assert cut.returncode == 0, cut.stderr
    args = checkpoints.load(str(repo / 'b' / 'ckpt.pt'))['model_args']
    assert (args['block_size'], args['window'], args['n_sink']) == (9, 6, 2)


@pytest.mark.parametrize('given, holds, said', [(0, 4, False), (4, 4, False), (0, 1, True), (1, 1, False),
                                                (2, 1, True)])
def test_no_heads_of_keys_mean_as_many_as_queries(given, holds, said):
    fixed, lines = tiny(n_kv_head=holds).config, []
    config = Settings(vars(fixed) | dict(n_kv_head=given), {'n_kv_head': 'command line'})
    settle_shape(config, fixed, 'ckpt.pt', lines.append)
    assert config['n_kv_head'] == holds and len(lines) == said
    if said:
        assert lines[0].startswith(f'n_kv_head stays 1, as in the weights of ckpt.pt: n_kv_head={given}')


def test_finetuning_a_starcoder2_keeps_its_window(repo):
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(0)
    config = transformers.Starcoder2Config(
        vocab_size=300, hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, sliding_window=7, tie_word_embeddings=True)
    transformers.Starcoder2ForCausalLM(config).save_pretrained(repo / 'hf')
    done = train(repo, '--init_from=hf', '--max_iters=2', '--eval_interval=2', '--window=0')
    assert done.returncode == 0, done.stderr
    assert 'window stays 7, as in the weights of hf: window=0 (command line) has no effect' in done.stdout
    args = checkpoints.load(str(repo / 'out' / 'ckpt.pt'))['model_args']
    kept = dict(block_size=16, window=7, position='rope', n_kv_head=2, gelu='tanh')
    assert kept.items() <= args.items()
    on = train(repo, '--init_from=resume', '--max_iters=3', '--eval_interval=3')
    assert on.returncode == 0 and 'stays' not in on.stdout.replace('n_head stays', ''), on.stderr
    short = train(repo, '--init_from=hf', '--block_size=7')
    assert short.returncode == 2 and 'block_size 7 must be more than' in short.stderr.splitlines()[-1]


@pytest.mark.parametrize('kind', KINDS)
def test_model_args_rebuild_the_model_and_nanogpt_reads_those_of_its_own_models(kind, tmp_path):
    model = tiny(**KINDS[kind]).eval()
    checkpoint = {'model': model.state_dict(), 'model_args': checkpoints.model_args(model.config)}
    nanogpt = {'block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'dropout', 'bias'}  # the names it accepts
    assert (set(checkpoint['model_args']) == nanogpt) == (kind == 'learned')
    checkpoints.save(checkpoint, str(tmp_path / 'ckpt.pt'))
    again = checkpoints.build(checkpoints.load(str(tmp_path / 'ckpt.pt')), GPT, GPTConfig).eval()
    assert again.config == model.config
    x, y = batch()
    assert torch.equal(again(x, y)[0], model(x, y)[0])


@pytest.mark.parametrize('kind', KINDS)
def test_the_mask_is_made_once_a_forward_pass(kind, monkeypatch):
    made, make_mask = [], Positions.make_mask

    def counted(self, keys, n_keys):
        made.append(n_keys)
        return make_mask(self, keys, n_keys)
    monkeypatch.setattr(Positions, 'make_mask', counted)
    model = tiny(**KINDS[kind])
    assert model(*batch())[0].shape == (3, 16, 11)
    assert made == ([16] if model.config.window or model.config.position == 'alibi' else [])


def step(model, compiled):
    """The loss of a batch before and after one step of AdamW."""
    optimizer, losses = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95), 'cpu'), []
    for seed in (1, 1):
        loss = compiled(*batch(seed))[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


# what is traced is the same with either backend; inductor also compiles it, to C++
@pytest.mark.parametrize('backend', sizes(['aot_eager'], ['aot_eager', 'inductor']))
@pytest.mark.parametrize('kind', sizes(['learned', 'alibi', 'window, sinks'], KINDS))
def test_a_compiled_training_step_is_the_step(kind, backend):
    torch._dynamo.reset()
    try:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    except Exception as e:
        pytest.skip(f"torch.compile does not run here: {type(e).__name__}, {str(e).splitlines()[0]}")
    model, twin = tiny(**KINDS[kind]), tiny(**KINDS[kind])
    plain, compiled = step(model, model), step(twin, torch.compile(twin, backend=backend))
    assert compiled == pytest.approx(plain, abs=1e-5) and plain[1] < plain[0]
    for (name, p), q in zip(model.named_parameters(), twin.parameters()):
        assert torch.allclose(p, q, atol=1e-3), name  # AdamW's first step divides each gradient by itself


def test_the_endless_config_trains_a_model_that_goes_on_past_block_size(repo):
    done = run(repo, 'train.py', 'config/train_shakespeare_char_endless.py', '--device=cpu', '--max_iters=2',
               '--eval_interval=2', '--eval_iters=1', '--batch_size=2', '--block_size=32', '--window=16', '--n_layer=2',
               '--n_head=2', '--n_embd=16')
    assert done.returncode == 0, done.stderr
    out = repo / 'out-shakespeare-char-endless'
    saved = checkpoints.load(str(out / 'ckpt.pt'))
    assert {'position': 'rope', 'window': 16, 'n_sink': 4}.items() <= saved['model_args'].items()
    model = checkpoints.build(saved, GPT, GPTConfig).eval()
    idx = torch.tensor([[1]])
    torch.manual_seed(5)
    cached = model.generate(idx, 100, use_cache=True)
    torch.manual_seed(5)
    assert torch.equal(cached, model.generate(idx, 100)) and cached.shape == (1, 101)
    sampled = run(repo, 'sample.py', f'--out_dir={out}', '--num_samples=1', '--max_new_tokens=100', '--use_cache=True')
    assert sampled.returncode == 0, sampled.stderr
