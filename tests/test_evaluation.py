"""bench.py --mode=eval, against the model without a cache in float64, and against lm-eval."""
import json
import math
import random
import shutil

import pytest
import torch
from conftest import run, sizes
from example_models import LLAMA, gpt, json_tokenizer, sentencepiece_tokenizer
from tiny_models import MODELS, model_of

import formats
from benchmarks import evaluation, ours
from benchmarks.evaluation import accuracies, bits_of
from engine import Engine
from tokenizer import CharTokenizer

TEXT = ' the fox and the house of 12345 \n\n naïve 🙂 “words” <b> the mouse' * 9
WORDS = TEXT.split()


def log_likelihood(model, context, continuation):
    """The log probability of each token of the continuation: one pass over all tokens, in float64."""
    tokens = torch.tensor([*context, *continuation])
    with torch.no_grad():
        logits = model(tokens[None, :-1], tokens[None, 1:])[0][0, len(context) - 1:]
    return logits.log_softmax(-1).gather(-1, torch.tensor(continuation)[:, None])[:, 0]


@pytest.mark.parametrize('kind', sizes(['learned', 'rope window sinks', 'llama'], [*MODELS]))
def test_log_likelihoods_are_those_of_one_pass(kind):
    """With contexts that are found in the pool and without, also where a page ends at either side."""
    model, rng = model_of(kind), random.Random(0)
    in_float64, score = model_of(kind, dtype=torch.float64), ours.log_likelihoods(model)
    context = [rng.randrange(29) for _ in range(33)]
    for n in (33, 16, 17, 32, 1, 33):
        pairs = [(context[:n], [rng.randrange(29) for _ in range(k)]) for k in (1, 2, 7)]
        for (before, behind), found in zip(pairs, score(pairs)):
            assert torch.allclose(found, log_likelihood(in_float64, before, behind), atol=1e-4)


def questions(rng, n):
    texts = lambda least, most: ' '.join(rng.choices(WORDS, k=rng.randint(least, most)))  # noqa: E731
    return [dict(question=texts(1, 30) + ' ' * rng.randint(0, 2), choices=[texts(1, 4) for _ in range(m)],
                 answer=rng.randrange(m)) for m in rng.choices((1, 2, 4), k=n)]


def test_choices_are_scored_and_share_the_prefix_of_their_question(monkeypatch):
    model, made, rng = gpt(**LLAMA), json_tokenizer(TEXT), random.Random(1)
    lines, counted = questions(rng, 40), []

    class Counted(Engine):
        def __init__(self, *args, **how):
            super().__init__(*args, **how)
            counted.append(self)
    monkeypatch.setattr(ours, 'Engine', Counted)
    got = accuracies(model, made, lines)
    right, in_float64, n_alone = [], gpt(**LLAMA).double(), 0
    for line in lines:
        sums = []
        for choice in line['choices']:
            whole = made.encode(line['question'] + ' ' + choice)
            n = len(made.encode(line['question'].rstrip()))
            n_alone += len(whole) - 1
            sums.append(log_likelihood(in_float64, whole[:n], whole[n:]).sum().item())
        of_character = [total / len(choice) for total, choice in zip(sums, line['choices'])]
        right.append([all_of.index(max(all_of)) == line['answer'] for all_of in (sums, of_character)])
    for name, each in zip(('acc', 'acc_norm'), zip(*right)):
        mean = sum(each) / len(each)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in each) / (len(each) - 1))
        assert got[name] == pytest.approx(mean) and got[name + '_error'] == pytest.approx(deviation / len(each) ** 0.5)
    assert counted[0].n_computed < 0.8 * n_alone


@pytest.mark.parametrize('begins', [True, False])
def test_bits_per_byte_are_those_of_one_pass_over_each_piece(begins):
    made = json_tokenizer(TEXT) if begins else CharTokenizer.of_text(TEXT)
    config = LLAMA | dict(block_size=40, vocab_size=made.vocab_size)
    model, in_float64, tokens = gpt(**config), gpt(**config).double(), made.encode(TEXT)
    n_bytes = len(TEXT.encode()) - (0 if begins else len(TEXT[0].encode()))
    tokens = [0, *tokens] if begins else tokens
    nats = []
    for start in range(0, len(tokens) - 1, 40):
        end = min(start + 40, len(tokens) - 1)
        found = log_likelihood(in_float64, tokens[max(0, end - 40):start + 1], tokens[start + 1:end + 1])
        nats.append(-found)
    got = bits_of(model, made, TEXT)
    assert got['bits_per_byte'] == pytest.approx(sum(x.sum().item() for x in nats) / math.log(2) / n_bytes, rel=1e-4)
    assert got['tokens'] == len(tokens) - 1 and got['bytes'] == n_bytes
    means = [x.mean().item() for x in nats[:-1]]  # pieces of one length, so that the error is that of a mean
    mean = sum(means) / len(means)
    error = math.sqrt(sum((x - mean) ** 2 for x in means) / (len(means) - 1) / len(means))
    assert got['standard_error'] / got['bits_per_byte'] == pytest.approx(error / got['nats_per_token'], rel=0.25)
    assert bits_of(model, made, TEXT[:9])['standard_error'] is None, "one piece has no spread"


def test_the_token_before_a_text():
    assert evaluation.begin_of(json_tokenizer(TEXT)) == 0 and evaluation.begin_of(CharTokenizer('ab')) is None
    assert evaluation.begin_of(sentencepiece_tokenizer(TEXT, special_tokens=dict(bos_token='<s>'))) == 1


def test_the_script_evaluates_a_run_on_files(repo, trained):
    shutil.copytree(trained / 'out', repo / 'out-mine')
    (repo / 'a.txt').write_bytes(b'the class\r\nstatement')  # read as prepare.py does
    lines = [dict(question='the class', choices=['is', 'body'], answer=1)] * 3
    (repo / 'q.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    evaluate = 'bench.py', '--mode=eval', '--init_from=out-mine', '--choices=q.jsonl'
    run(repo, *evaluate, '--text=a.txt', '--json=b.json', code=0)
    figures = json.loads((repo / 'b.json').read_text())
    (text,), (choices,) = figures['text']['rows'], figures['choices']['rows']
    assert text['model'] == 'out-mine' and text['tokens'] == 18 and 0 < text['bits_per_byte'] < 9
    assert choices['questions'] == 3 and choices['acc'] in (0, 1) and choices['acc_error'] == 0
    for content, says in (('{"question": "a", "choices": ["b"], "answer": 1}', 'q.jsonl, line 1 must be {"question"'),
                          ('', 'q.jsonl has no questions'),
                          ('{"question": "", "choices": ["a"], "answer": 0}', 'line 1: a question must not be empty'),
                          ('{"question": "a", "choices": ["%s"], "answer": 0}' % ('the ' * 99), "the model's context"),
                          ('{"question": "a", "choices": "b", "answer": 0}', 'must be')):
        (repo / 'q.jsonl').write_text(content)
        done = run(repo, *evaluate)
        assert done.returncode == 2 and says in done.stderr.splitlines()[-1], done.stderr


def test_the_figures_are_those_of_lm_eval(tmp_path):
    """A llama of ours in transformers, one file of questions, and texts longer than its context."""
    pytest.importorskip('lm_eval', reason="lm-eval is not installed")
    from lm_eval import simple_evaluate
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM
    model, made = gpt(**LLAMA), json_tokenizer(TEXT)
    formats.to_huggingface(model, tmp_path / 'hf', made)
    lines, text = questions(random.Random(2), 60), TEXT * 4
    (tmp_path / 'q.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    (tmp_path / 't.jsonl').write_text(json.dumps(dict(text=text)))

    def task(name, file, **config):
        data = dict(dataset_path='json', dataset_kwargs=dict(data_files=dict(test=str(tmp_path / file))))
        return ConfigurableTask(config=dict(task=name, test_split='test', **data, **config))
    tasks = [task('mine', 'q.jsonl', output_type='multiple_choice', doc_to_text='{{question}}',
                  doc_to_choice='{{choices}}', doc_to_target='{{answer}}',
                  metric_list=[dict(metric='acc'), dict(metric='acc_norm')]),
             task('text', 't.jsonl', output_type='loglikelihood_rolling', doc_to_text='', doc_to_target='{{text}}',
                  metric_list=[dict(metric='bits_per_byte')])]
    theirs = simple_evaluate(HFLM(pretrained=str(tmp_path / 'hf'), device='cpu', dtype='float32', batch_size=1),
                             tasks=tasks, bootstrap_iters=0)['results']
    got = accuracies(model, made, lines)
    for name in ('acc', 'acc_norm'):
        assert got[name] == pytest.approx(theirs['mine'][f'{name},none'], abs=1e-9)
    assert bits_of(model, made, text)['bits_per_byte'] == pytest.approx(theirs['text']['bits_per_byte,none'], rel=1e-5)
