"""Training on conversations: what is scored, as transformers marks it; rows and batches; runs that stop and go on."""
import itertools
import json
import math
import os
import random
import re

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, run, sizes
from example_models import CHAT, bpe, chat_tokenizer, needs_byte_pairs, sentencepiece_tokenizer
from test_chat_template import conversation
from test_parallel import gloo, train_in  # noqa: F401
from test_train import same

import checkpoint as checkpoints
from chat import answers
from chat.answers import scored_tokens
from model import GPT, GPTConfig
from tokenizer import CharTokenizer, JSONTokenizer, read_text
from training.conversations import FIRST, SCORED, Conversations

MARKED = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
          "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}"
          "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
IN_A_MACRO = """\
{%- macro said(m) %}{% generation %}{{ m.content | trim }}{{ eos_token }}{% endgeneration %}{% endmacro -%}
{%- for m in messages %}
    {%- set first = loop.first %}
    {%- if m.role == 'assistant' %}{{ 'A: ' }}{{ said(m) }}{% else %}{{ '[' + m.role + '] ' + m.content }}{% endif %}
{%- endfor %}"""
PLAIN = answers.PLAIN.replace('END', '"<|im_end|>"')
# ours, and that of transformers
TEMPLATES = {'marked': (MARKED, MARKED), 'macro': (IN_A_MACRO, IN_A_MACRO), 'plain': (PLAIN, PLAIN),
             'without marks': (CHAT, MARKED)}
TEXTS = ' there is a fox and the house of 12345 \n\n naïve 🙂 “words” <b>' * 20


def theirs(tokenizer, template, folder):
    """The same tokenizer in transformers."""
    transformers = pytest.importorskip('transformers', reason="transformers is not installed")
    (folder / 'tokenizer.json').write_text(tokenizer.json, encoding='utf-8')
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / 'tokenizer.json'), clean_up_tokenization_spaces=False, **tokenizer.special_tokens)
    made.chat_template = template
    return made


def with_template(tokenizer, template):
    return JSONTokenizer(tokenizer.json, [*tokenizer.ends], tokenizer.special_tokens, template)


@pytest.mark.parametrize('kind, name', [
    *itertools.product(['byte level', 'sentencepiece'], ['marked', 'macro', 'plain']), ('byte level', 'without marks')])
def test_what_is_scored_is_what_transformers_marks(tmp_path, kind, name):
    """Without marks an answer goes up to its end token."""
    template, marked = TEMPLATES[name]
    made = chat_tokenizer(TEXTS) if kind == 'byte level' else sentencepiece_tokenizer(
        TEXTS, special_tokens=dict(eos_token='</s>'))
    ours, other, n_scored = with_template(made, template), theirs(made, marked, tmp_path), 0
    for seed in range(sizes(40, 300)):
        messages = conversation(random.Random(seed))
        if any('<|im_end|>' in m['content'] for m in messages if m['role'] == 'assistant'):
            continue
        expected = other.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, scored = scored_tokens(ours, messages)
        assert ids.tolist() == expected['input_ids']
        assert scored.astype(int).tolist() == expected['assistant_masks'], (seed, messages)
        n_scored += scored.sum()
    assert n_scored > 200


def test_without_marks_an_answer_goes_up_to_its_end_token():
    made = chat_tokenizer(TEXTS)
    for template in ("{% for m in messages[-2:] %}{{ m.content }}<|im_end|>{% endfor %}",
                     "{% for m in messages %}{{ m.content }}{% endfor %}",  # and one for lists of parts:
                     "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>{% endfor %}"):
        with pytest.raises(ValueError, match=r'does not show where message \d, of the assistant, begins and ends'):
            scored_tokens(with_template(made, template), [
                dict(role=role, content='ab') for role in ('user', 'assistant', 'user') * 2])


def test_an_answer_with_the_text_of_its_end_is_refused():
    """A model would learn to end there, and to go on behind an end."""
    messages = [dict(role='user', content='ab'), dict(role='assistant', content='a <|im_end|> b')]
    for template in CHAT, MARKED:
        with pytest.raises(ValueError, match=r'message 2, of the assistant, has the text <\|im_end\|>, the token that'):
            scored_tokens(with_template(chat_tokenizer(TEXTS), template), messages)


def test_a_model_without_a_template_gets_the_plain_one():
    bare = JSONTokenizer(chat_tokenizer(TEXTS).json)
    for made in (answers.chat_tokenizer(bare), answers.chat_tokenizer(answers.chat_tokenizer(bare))):
        messages = [dict(role='system', content='Be '), dict(role='user', content='Hi'),
                    dict(role='assistant', content=' the house\n')]
        ids, scored = scored_tokens(made, messages)
        assert made.decode(ids) == '### system\nBe\n### user\nHi\n### assistant\nthe house<|endoftext|>\n'
        assert made.decode(ids[scored]) == 'the house<|endoftext|>' and made.end_tokens == (0,)
        assert made.conversation(messages[:2]) == ids[:int(scored.argmax())].tolist()  # what a prompt then is
        assert made.encode(TEXTS) == bare.encode(TEXTS)
    assert answers.chat_tokenizer(chat_tokenizer()).chat_template.source == CHAT
    with pytest.raises(ValueError, match='a token that ends an answer, and this tokenizer has none'):
        answers.chat_tokenizer(CharTokenizer('abc'))


@needs_byte_pairs
def test_gpt2s_byte_pairs_get_it_too(monkeypatch):
    made = answers.chat_tokenizer(bpe(monkeypatch))
    ids, scored = scored_tokens(made, [dict(role='user', content='Hello'), dict(role='assistant', content='Hello you')])
    assert ids[scored].tolist() == [15496, 345, 50256] and made.end_tokens == (50256,)


def write_rows(folder, rows):
    """Files as data/chat/prepare.py writes them. rows: pairs of lists, tokens and whether each is scored."""
    for split in ('train', 'val'):
        np.array([t for tokens, _ in rows for t in tokens], np.uint16).tofile(folder / f'{split}.bin')
        np.array([(s * SCORED) | (FIRST if i == 0 else 0) for _, scored in rows for i, s in enumerate(scored)],
                 np.uint8).tofile(folder / f'{split}_marks.bin')
    (folder / 'meta.json').write_text(json.dumps(dict(vocab_size=50, dtype='uint16', conversations={})))


def drawn_rows(n, rng, least=2, most=40):
    """Token 2 * row number begins each, so that it can be found again."""
    rows = []
    for i in range(n):
        length = rng.randint(least, most)
        scored = [rng.random() < 0.4 for _ in range(length)]
        scored[1] = True
        rows.append(([i] + [rng.randrange(50) for _ in range(length - 1)], scored))
    return rows


def test_batches_have_each_row_padded_masked_and_beside_rows_of_its_length(tmp_path):
    rows = drawn_rows(45, random.Random(0))
    write_rows(tmp_path, rows)
    batches = Conversations(str(tmp_path), 'train', 8, 20, 50, 'cpu', 1)
    assert batches.n_cut == sum(len(tokens) > 21 for tokens, _ in rows)
    orders, n_padding, n_tokens = [], 0, 0
    for epoch in range(3):
        seen = []
        for step in range(6):
            x, y = batches(6 * epoch + step)
            assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape and len(x) == 8 and x.size(1) <= 20
            lengths = []
            for inputs, targets in zip(x.tolist(), y.tolist()):
                tokens, scored = (each[:21] for each in rows[inputs[0]])
                n = len(tokens) - 1
                assert inputs == tokens[:-1] + [0] * (len(inputs) - n)
                assert targets == [t if s else -1 for t, s in zip(tokens[1:], scored[1:])] + [-1] * (len(inputs) - n)
                lengths.append(n)
                seen.append(inputs[0])
            n_padding, n_tokens = n_padding + sum(x.size(1) - n for n in lengths), n_tokens + sum(lengths)
        assert {*seen} == set(range(45)) and len(seen) == 48
        orders.append(seen)
    assert n_padding < 0.2 * n_tokens and orders[0] != orders[1]  # in any order about a half would be padding
    again = Conversations(str(tmp_path), 'train', 8, 20, 50, 'cpu', 1)
    assert all(torch.equal(a, b) for a, b in zip(batches(9), again(9)))  # steps before it do not count
    assert not torch.equal(batches(0)[1], Conversations(str(tmp_path), 'train', 8, 20, 50, 'cpu', 2)(0)[1])
    few = Conversations(str(tmp_path), 'train', 64, 20, 50, 'cpu', 1)(0)[0]
    assert few.shape[0] == 64 and len({*few[:, 0].tolist()}) == 45


def test_a_padded_row_has_the_loss_and_the_gradients_of_itself_alone(tmp_path):
    rows = drawn_rows(4, random.Random(1), 5, 15)
    write_rows(tmp_path, rows)
    torch.manual_seed(0)
    for kind in (dict(), dict(position='rope', window=4, n_sink=1), dict(position='alibi')):
        model = GPT(GPTConfig(block_size=20, vocab_size=50, n_layer=2, n_head=2, n_embd=16, **kind)).double()
        model(*Conversations(str(tmp_path), 'train', 4, 20, 50, 'cpu')(0))[1].backward()
        gradients, total, n = [p.grad.clone() for p in model.parameters()], 0, 0
        for tokens, scored in rows:
            logits = model(torch.tensor([tokens[:-1]]), torch.tensor([tokens[1:]]))[0][0].log_softmax(-1)
            total = total - sum(logits[i, t] for i, (t, s) in enumerate(zip(tokens[1:], scored[1:])) if s)
            n += sum(scored[1:])
        model.zero_grad()
        (total / n).backward()
        assert all(torch.allclose(p.grad, g, atol=1e-12) for p, g in zip(model.parameters(), gradients))


def test_rows_without_anything_to_score_are_refused_by_number(tmp_path):
    rows = drawn_rows(6, random.Random(2), 10, 12)
    rows[1] = rows[1][0], [False] * len(rows[1][1])
    rows[4] = rows[4][0], [True] + [False] * 7 + [True] * (len(rows[4][1]) - 8)  # the cut hides these
    write_rows(tmp_path, rows)
    with pytest.raises(ValueError, match=r'nothing within block_size 7 in 2 of the conversations of train.bin, among '
                                         'these number 2, 5: raise'):
        Conversations(str(tmp_path), 'train', 2, 7, 50, 'cpu')
    with pytest.raises(ValueError, match='in 1 of the conversations of train.bin, among these number 2: raise'):
        Conversations(str(tmp_path), 'train', 2, 8, 50, 'cpu')
    with pytest.raises(ValueError, match='vocab_size 20: run data/chat/prepare.py again'):
        Conversations(str(tmp_path), 'train', 2, 8, 20, 'cpu')


def chat_files(repo, n=30):
    """Writes two files of conversations and a tokenizer. Returns the lines, and the settings of prepare.py."""
    rng, words = random.Random(3), TEXTS.split()
    lines = [dict(messages=[dict(role=role, content=' '.join(rng.choices(words, k=rng.randint(1, 9))))
                            for role in ('user', 'assistant') * rng.randint(1, 2)]) for _ in range(n)]
    for name, part in (('a', lines[:n // 2]), ('b', lines[n // 2:])):
        (repo / f'{name}.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in part))
    (repo / 'my.txt').write_text(TEXTS * 9)
    run(repo, 'data/shakespeare/prepare.py', '--input=my.txt', '--vocab_size=300', code=0)
    return lines, ['--input=a.jsonl,b.jsonl', '--tokenizer=data/shakespeare']


SHORT = '--dataset=chat', '--block_size=64', '--eval_interval=3', '--eval_iters=2'


def test_runs_on_conversations_stop_and_go_on_to_the_bit(repo):
    """From scratch in one go and in two, the first ends within an epoch; and from the model of another run on."""
    lines, settings = chat_files(repo)
    assert 'train.bin: 27 conversations' in run(repo, 'data/chat/prepare.py', *settings, code=0).stdout
    made = checkpoints.tokenizer_named(str(repo / 'data' / 'chat'))
    tokens, marks = (np.fromfile(repo / 'data' / 'chat' / name, kind)
                     for name, kind in (('val.bin', np.uint16), ('val_marks.bin', np.uint8)))
    held_out = [m['content'] + '<|endoftext|>' for line in lines[9::10] for m in line['messages'][1::2]]
    assert made.decode(tokens[marks & SCORED > 0]) == ''.join(held_out) and (marks & FIRST).sum() > 1
    for more in (['--out_dir=a', '--max_iters=9'], ['--out_dir=b', '--max_iters=3'],
                 ['--out_dir=b', '--max_iters=9', '--init_from=resume']):
        done = run(repo, 'train.py', *TINY, *SHORT, *more, code=0)
    loss, perplexity = re.findall(r'val loss ([\d.]+) \(perplexity ([\d.]+)\)', done.stdout)[-1]
    assert float(perplexity) == pytest.approx(math.exp(float(loss)), rel=1e-3) and 'mfu' not in done.stdout
    assert 'python sample.py --out_dir=b --chat talks with it' in done.stdout.splitlines()[-1]
    a, b = (checkpoints.load(str(repo / d / 'ckpt.pt')) for d in 'ab')
    assert same(a['model'], b['model']) and a['tokenizer']['chat_template'] == made.chat_template.source
    base = '--dataset=shakespeare', '--block_size=64', '--out_dir=base', '--max_iters=1'  # it has no chat template
    run(repo, 'train.py', *TINY, *base, code=0)
    more = '--block_size=48', '--init_from=base', '--out_dir=c', '--max_iters=1'
    assert 'are longer than block_size 48, and cut there' in run(repo, 'train.py', *TINY, *SHORT, *more, code=0).stdout
    c = checkpoints.load(str(repo / 'c' / 'ckpt.pt'))
    assert c['iter_num'] == 1 and c['model_args']['block_size'] == 64
    assert c['tokenizer']['chat_template'] == a['tokenizer']['chat_template']


def test_each_scored_token_weighs_the_same_however_rows_are_divided(repo, request):
    """All 18 rows at once, one by one, in two batches, and by two processes: the mean over tokens, not over batches."""
    _, settings = chat_files(repo, 20)
    run(repo, 'data/chat/prepare.py', *settings, code=0)
    how, found = (*SHORT, '--max_iters=3', '--log_interval=1', '--learning_rate=1e-3', '--dropout=0.0'), []
    for n, n_processes in (1, 1), (18, 1), (2, 1), (2, 2):
        batches = f'--gradient_accumulation_steps={n}', f'--batch_size={18 // n}'
        if n_processes == 1:
            said = run(repo, 'train.py', *TINY, *how, *batches, code=0).stdout
        else:
            request.getfixturevalue('gloo')
            said = train_in(repo, n_processes, *how, *batches)
        losses = [float(loss) for loss in re.findall(r'^iter \d+: loss ([\d.]+)', said, re.M)]
        found.append((losses, checkpoints.load(str(repo / 'out' / 'ckpt.pt'))))
    (losses, one), *others = found
    for theirs, other in others:
        assert theirs == pytest.approx(losses, abs=2e-4) and len(losses) == 3
        assert all(torch.allclose(w, other['model'][name], atol=2e-4) for name, w in one['model'].items())
    assert others[-1][1]['best_val_loss'] == pytest.approx(others[-2][1]['best_val_loss'], abs=2e-5)


HI = dict(role='user', content='Hi')


@pytest.mark.parametrize('text, says', [
    ('{"messages": []}', 'my.jsonl, line 1 must be {"messages": [{"role"'), ('{"messages": [1]}', 'must be'),
    ('{"messages": [{"role": "user"}]}', 'must be'), ('[' * 99999, 'must be'), ('', 'there are 0 conversations'),
    ('{"messages": [{"role": "user", "content": ["Hi"]}]}', 'must be'),
    (json.dumps(dict(messages=[HI])), 'my.jsonl, line 1: the assistant says nothing'),
    (json.dumps(dict(messages=[HI, dict(HI, role='assistant', content='\ud800')])), 'line 1: characters'),
    (json.dumps(dict(messages=[HI, dict(HI, role='assistant', content=' ')])), 'message 2, of the assistant, is empty'),
    (json.dumps(dict(messages=[HI, dict(HI, role='assistant', content=None, tool_calls=[{}])])), 'message 2 calls'),
    (json.dumps(dict(messages=[HI, dict(HI, role='assistant', weight=0)])), 'message 2 has the weight 0'),
    (json.dumps(dict(messages=[HI, dict(role='assistant', content=None)])), 'role and content of message 2'),
    (json.dumps(dict(messages=[HI, dict(role='gpt', content='a')])), 'line 1: the role of message 2 must'),
    (json.dumps(dict(messages=[HI, dict(role='assistant', content='a\ufdd0b')])), 'line 1: a message has'),
    (json.dumps(dict(messages=[HI, dict(HI, role='assistant')], held_out='false')), '"held_out" must be true or false'),
    ((json.dumps(dict(messages=[HI, dict(HI, role='assistant')])) + '\n') * 3, '3 conversations to train on and 0')])
def test_what_is_no_conversation_is_one_line(repo, text, says):
    if not (repo / 'data' / 'shakespeare' / 'tokenizer.json').exists():
        (repo / 'data' / 'shakespeare' / 'tokenizer.json').write_text(chat_tokenizer(TEXTS).json, encoding='utf-8')
    (repo / 'my.jsonl').write_text(text, encoding='utf-8')
    done = run(repo, 'data/chat/prepare.py', '--input=my.jsonl', '--tokenizer=data/shakespeare')
    assert done.returncode == 2 and 'Traceback' not in done.stderr, done.stderr
    assert says in done.stderr.splitlines()[-1] and not (repo / 'data' / 'chat' / 'train.bin').exists()


def test_what_our_conversations_name_is_there():
    """Files, settings of sample.py and train.py, and each held-out question has an answer that is trained on."""
    lines = [json.loads(line) for line in read_text(f'{ROOT}/data/chat/kv_cache.jsonl').splitlines()]
    source = {name: read_text(f'{ROOT}/{name}')
              for name in ('sample.py', 'train.py', 'export.py', 'model.py', 'Makefile', 'engine/engine.py')}
    everything, said = '\n'.join(source.values()), set()
    for line in lines:
        text = ' '.join(m['content'] for m in line['messages'] if m['role'] == 'assistant')
        for path in re.findall(r'[\w/]+\.py', text):
            assert os.path.exists(os.path.join(ROOT, path)), path
        for setting in re.findall(r'--(\w+)', text):
            assert re.search(rf'^{setting} = ', everything, re.M), setting
        if not line.get('held_out'):
            said |= {m['content'] for m in line['messages'] if m['role'] == 'assistant'}
    assert all(line['messages'][-1]['content'] in said for line in lines) and len(lines) > 100
    questions = [line['messages'][0]['content'] for line in lines if len(line['messages']) == 2]
    assert len({*questions}) == len(questions), "a question is held out and trained on, or twice there"
    assert 'PAGE_SIZE = 16' in source['engine/engine.py'] and '\nserve:' in source['Makefile']
