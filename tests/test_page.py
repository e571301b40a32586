"""The page in a browser, headless Chromium, with a real engine on a small model that steps when a test lets it."""
import json
import os
import re
import shutil
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from xml.etree import ElementTree

import pytest
from conftest import SERVING, needs, sizes
from example_models import TEXT, json_tokenizer

needs(*SERVING, 'selenium')

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support import expected_conditions
from selenium.webdriver.support.ui import WebDriverWait
from serving_process import serving
from small_engine import drawing_engine, served_by

from tokenizer import JSONTokenizer

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
DRIVER = shutil.which('chromedriver')
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no browser: chromium, chromium-driver")

PROMPT = 'once upon a time there was a king'
# what the page does a second or more later comes sooner
SOON = '{const timeout = setTimeout; setTimeout = (f, ms) => timeout(f, ms < 1000 ? ms : ms / 10)}'
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@pytest.fixture(scope='module')
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ('--headless=new', '--disable-gpu', '--disable-background-networking', '--disable-dev-shm-usage'):
        options.add_argument(argument)
    if hasattr(os, 'geteuid') and os.geteuid() == 0:
        options.add_argument('--no-sandbox')
    options.set_capability('goog:loggingPrefs', {'browser': 'ALL'})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.execute_cdp_cmd('Page.addScriptToEvaluateOnNewDocument', {'source': SOON})
    yield driver
    driver.quit()


@pytest.fixture
def page(browser):
    """A server with the page open. page.client: of the server. page.engine: its engine."""
    engine = drawing_engine()
    with serving(engine) as client, opened(browser, client, engine) as page:
        yield page
        browser.get('about:blank')


@pytest.fixture(scope='module')
def chat_server():
    """(the client of a model whose tokenizer has a chat template, its engine)"""
    tokenizer = JSONTokenizer(json_tokenizer(TEXT).json, chat_template=TEMPLATE)
    engine = drawing_engine(tokenizer)
    with serving(engine, served_by(engine, tokenizer=tokenizer)) as client:
        yield client, engine


@pytest.fixture
def chat(browser, chat_server):
    """The page of a model that chats. chat.tokenizer: the model's."""
    client, engine = chat_server
    with opened(browser, client, engine) as page:
        page.tokenizer = client.service.served.tokenizer
        page.fill(max_tokens=20)
        yield page


@contextmanager
def opened(browser, client, engine):
    """The page that it yields finds nothing stored in the browser, and nothing remembered in the pool."""
    page = Page(browser, client, engine)
    browser.get(f'{client.base_url}/health')
    browser.execute_script('sessionStorage.clear(); localStorage.clear()')
    engine.until(lambda: not engine.live)
    with engine.steps:
        engine.engine.pool.reset()
    page.open()
    yield page
    engine.allow(float('inf'))
    assert [entry for entry in browser.get_log('browser') if entry['source'] != 'network'] == []


class Page:
    def __init__(self, browser, client, engine):
        self.browser, self.client, self.engine = browser, client, engine

    def open(self):
        self.browser.get(str(self.client.base_url))
        self.wait(lambda: self.text('#status') == 'connected')

    def wait(self, condition):
        return WebDriverWait(self.browser, 30, .03).until(lambda _: condition())

    def __getitem__(self, selector):
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector):
        return self[selector].get_property('textContent')

    def all(self, selector):
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def fill(self, **values):
        for name, value in values.items():
            field = self['#' + name]
            self.browser.execute_script("arguments[0].closest('details')?.setAttribute('open', '')", field)
            field.clear()
            field.send_keys(str(value))

    def paste(self, name, text):
        """Replace the text of a field, at once."""
        self.browser.execute_script('arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event("input"))',
                                    self['#' + name], text)

    def focused(self):
        """The id of the element that has the keyboard."""
        return self.browser.switch_to.active_element.get_attribute('id')

    def tab(self, n):
        """Press Tab so often. Returns the names, for a screen reader, of what then has the keyboard, and shows it."""
        names = []
        for _ in range(n):
            ActionChains(self.browser).send_keys(Keys.TAB).perform()
            active = self.browser.switch_to.active_element
            assert active.value_of_css_property('outline-style') != 'none'
            names.append(' '.join(active.accessible_name.split()))
        return names

    def visible(self, selector):
        """Is all of this element in the window, and nothing before it?"""
        return self[selector].is_displayed() and self.browser.execute_script("""
            const element = document.querySelector(arguments[0])
            const {top, bottom, left, right} = element.getBoundingClientRect(), middle = (left + right) / 2
            return [top + 1, bottom - 1].every(y => element.contains(document.elementFromPoint(middle, y)))
            """, selector)

    def finished(self):
        return self['#go'].is_enabled()

    def samples(self):
        return [pre.get_property('textContent') for pre in self.all('#samples pre')]

    def answers(self, **fields):
        """What the API answers, each after the prompt, as the page shows it."""
        body = {'prompt': PROMPT, 'temperature': .8, 'top_p': 1, 'echo': True, **fields}
        return [choice['text'] for choice in self.client.post('/v1/completions', json=body).json()['choices']]

    def say(self, text):
        """Write a message, and send it with Enter."""
        self['#message'].send_keys(Keys.CONTROL, 'a')
        self['#message'].send_keys(text, Keys.ENTER)

    def press(self, name, end='', text=''):
        """Press the button with this name for a screen reader, and wait for an answer. end, text: see `dialog`."""
        self.wait(lambda: self.all(f'[aria-label="{name}"]'))[0].send_keys(Keys.ENTER)
        asked = self.dialog(end, text) if end else ''
        self.wait(self.finished)
        return asked

    def dialog(self, end, text=''):
        """'accept' or 'dismiss' what the browser asks, with this text. Returns what it asks."""
        dialog = WebDriverWait(self.browser, 30, .03).until(expected_conditions.alert_is_present())
        asked = dialog.text
        if text:
            dialog.send_keys(text)
        getattr(dialog, end)()
        return asked

    def ask(self, text):
        """Say it, and wait for the answer."""
        self.say(text)
        self.wait(self.finished)

    def go(self):
        """Send what is written, and wait for what comes."""
        self['#go'].click()
        self.wait(self.finished)

    def hear(self, message):
        """Say it, and let `speak` say what comes, in place of the model."""
        self.browser.execute_script("""
            const real = window.fetch, encoder = new TextEncoder()
            const stream = new ReadableStream({start(it) {
              window.speak = (delta, finish_reason = null) => {
                const choices = [{index: 0, delta, token_ids: [1], finish_reason}]
                it.enqueue(encoder.encode(`data: ${JSON.stringify({choices})}\n\n`))
                if (finish_reason) it.close()
              }
            }})
            window.fetch = (path, how) => {
              if (path !== 'v1/chat/completions') return real(path, how)
              window.fetch = real
              return Promise.resolve(new Response(stream))
            }""")
        self.say(message)

    def speak(self, *pieces, end=None, field='content'):
        """Let these pieces of an answer come, and its end, if end is the reason for it."""
        self.browser.execute_script("""
            for (const piece of arguments[0]) speak({[arguments[2]]: piece})
            if (arguments[1]) speak({}, arguments[1])""", pieces, end, field)
        self.wait(lambda: self.finished() if end else self.browser.execute_script("""
            const said = conversation().at(-1)[arguments[1]]
            return said?.endsWith(arguments[0]) && !turns.at(-1).answer.timer""", pieces[-1], field))

    def turns(self):
        """The conversation that is sent, without a system message, as messages of the API."""
        return [each for each in self.browser.execute_script('return conversation()') if each['role'] != 'system']

    def answer(self, messages, **fields):
        """What the API answers, a message of the assistant."""
        body = {'messages': messages, 'temperature': .8, 'max_completion_tokens': 20, 'seed': 1337, **fields}
        message = self.client.post('/v1/chat/completions', json=body).json()['choices'][0]['message']
        return {name: message[name] for name in ('role', 'content')}

    def is_answered(self, messages, **fields):
        """Is the page's answer the API's to these messages, and is no more shown? Turn i draws with the seed + i."""
        self.wait(self.finished)
        return self.turns() == [*messages, self.answer(messages, **dict(seed=1337 + len(messages) // 2) | fields)]

    def squares(self):
        return self.browser.execute_script("return [...document.querySelectorAll('#pool > i')].map("
                                           "i => i.className.split(' ')[0])")


def kinds(state):
    """What the squares must be."""
    return ['shared' if len(block['samples']) > 1 else 'used' if block['samples'] else
            'remembered' if block['remembered'] else 'free' for block in state['blocks']]


def test_types_and_reads_the_stream(page):
    """Samples stream side by side and have the API's texts for the same seed. Without a template there is no chat."""
    assert page.client.get('/v1/models').json()['data'][0]['chat'] is False
    assert page['#prompt'].is_displayed() and not page['#n'].is_displayed() and page['#go'].text == 'Continue'
    assert not any(element.is_displayed() for element in page.all('[data-mode=chat]'))
    page.fill(prompt=PROMPT, seed=5, n=3, max_tokens=40)
    page.engine.allow(20)
    page['#go'].click()
    page.wait(lambda: len(page.samples()) == 3 and all(len(text) > len(PROMPT) for text in page.samples()))
    assert all(len(text) < len(PROMPT) + 40 for text in page.samples()) and not page.finished()
    page.engine.allow(float('inf'))
    page.wait(page.finished)
    assert page.samples() == page.answers(seed=5, n=3, max_tokens=40)
    assert [note.text for note in page.all('.sample footer span:first-child')] == ['40 tokens, cut off'] * 3
    speeds = [speed.text for speed in page.all('.sample footer span:nth-child(2)')]
    assert all(re.fullmatch(r'[1-9][\d.]* m?s to the first token, [1-9][\d,.]* tokens/s', each) for each in speeds)
    assert len(speeds) == 3 and len({e.location['y'] for e in page.all('.sample')}) < 3
    whole = page.samples()
    page.fill(prompt='Q')
    page.go()
    assert 'never saw' in page.text('#error') and page.samples() == whole  # no empty boxes
    page.fill(n=17)
    page['#settings summary'].click()
    page.go()
    assert page.focused() == 'n' and page['#n'].is_displayed() and page.samples() == whole  # what is wrong unfolds


def test_works_with_the_keyboard(page):
    page.engine.allow(12)
    page['#prompt'].clear()
    page['#prompt'].send_keys(PROMPT, Keys.CONTROL, Keys.ENTER)
    page.wait(lambda: page.samples() and len(page.samples()[0]) > len(PROMPT))
    page.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.wait(lambda: page.finished() and not page.engine.live)
    assert page.text('.sample footer span').endswith(', stopped') and not page.text('#error')
    order = page.tab(2)
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert order + page.tab(8) == [
        'Continue', 'Settings temperature 0.8, top p 1, 100 tokens', 'Temperature', 'Top p', 'Seed', 'Samples',
        'Tokens', 'Sample 1', 'Copy sample 1', 'Go on with sample 1']
    page['#pool'].send_keys(Keys.HOME)
    assert page.text('#inspector').startswith('Block 0, remembered') and PROMPT[:4] in page.text('#inspector pre')
    page['#pool'].send_keys(Keys.ARROW_RIGHT)
    assert page.text('#inspector').startswith('Block 1') and PROMPT[4:8] in page.text('#inspector pre')
    page['#pool'].send_keys(Keys.END, Keys.ARROW_DOWN)
    assert page.text('#inspector').startswith('Block 95, free')


def test_squares_agree_with_the_cache(page):
    """While three samples wait for their next step. Blocks that a served request has left are grey, not as if free."""
    page.answers(prompt='another one', max_tokens=1)
    page.wait(lambda: page.squares().count('remembered') == len('another one') // 4)
    assert len({page['#pool > i.' + kind].value_of_css_property('background-color')
                for kind in ('remembered', 'free')}) == 2
    page.fill(prompt=PROMPT, n=3, max_tokens=50)
    page.engine.allow(26)  # the first one computes the prompt
    page['#go'].click()
    page.wait(lambda: page.client.get('/cache').json()['counters']['generated_tokens'] == 1 + 3 * 25)
    page.wait(lambda: page.squares() == kinds(page.client.get('/cache').json()))
    state = page.client.get('/cache').json()
    assert kinds(state).count('shared') == len(PROMPT) // 4 and len(state['running']) == 3
    assert [int(page.text('#n-' + kind)) for kind in ('used', 'shared', 'free')] == [
        kinds(state).count(kind) for kind in ('used', 'shared', 'free')]
    colours = page.browser.execute_script("""
        return [...document.querySelectorAll('#pool > i')].map(i => i.getAttribute('style') ?? '')""")
    assert all(('gradient' in colour) == (kind == 'shared') for colour, kind in zip(colours, kinds(state)))
    assert len({c for c, kind in zip(colours, kinds(state)) if kind == 'used'}) == 3

    block = kinds(state).index('shared')
    ActionChains(page.browser).move_to_element(page.all('#pool > i')[block]).perform()
    page.wait(lambda: page.text('#inspector').startswith(f'Block {block}, shared by 3'))
    assert page.text('#inspector pre') == state['blocks'][block]['text']
    assert len(page.all('#running li.of-block')) == 3

    ActionChains(page.browser).move_to_element(page.all('#running li')[1]).perform()
    page.wait(lambda: page.all('#inspector .table span'))
    assert [int(chip.text) for chip in page.all('#inspector .table span')] == state['running'][1]['blocks']
    picked = [int(square.get_attribute('data-block')) for square in page.all('#pool > i.picked')]
    assert picked == sorted(state['running'][1]['blocks']) and 'this page' in page.text('#running')


@pytest.mark.parametrize('width, scheme', sizes([(390, 'dark')], [
    (width, scheme) for width in (390, 1280) for scheme in ('dark', 'light')]))
def test_the_look_of_a_chat(chat, width, scheme):
    """Nothing is wider than its place, text stands out (WCAG: a contrast of 4.5), an error is where one looks."""
    look = partial(check_look, chat, scheme)
    with shown(chat, width, scheme, 860):
        chat['#settings summary'].click()
        look('label[for=message]', '#new', 'summary', '#set')
        chat.ask('a word of more than its line: ' + 'x' * 80)
        look('.asked pre', '.asked button', '.text', '.sample footer', '.found')
        chat.hear('And in Markdown?')
        chat.speak(MARKDOWN[:330])
        look()
        chat.speak(MARKDOWN[330:], end='stop')
        look(*('.text ' + each for each in (
            'h3', 'code', 'a', 'blockquote', 'th', 'td', '.code span', '.code button', '.code code')))
        assert chat.visible('.turn:last-child footer')
        chat.press('Edit turn 2')
        chat['#shelf summary'].click()
        chat.wait(lambda: chat.all('#list .name'))
        look('#list .name', '#list time', '#list button')
        chat['#shelf summary'].click()
        chat['#settings summary'].click()
        for forget in (partial(chat.fill, seed=7), chat['#new'].click):
            chat.paste('message', 'a word\n' * 500)
            chat.go()
            assert 'largest prompt' in chat.text('#error') and chat.visible('#error') and chat.visible('#go')
            assert chat.text('#error')[0].isupper() and chat['#message'].get_property('value') == 'a word\n' * 500
            look('#error', '#settings label', '#settings output', '#inspector')
            forget()
            assert not chat['#error'].is_displayed()
        assert not chat.turns()


@pytest.mark.parametrize('width, scheme', sizes([(390, 'dark')], [(390, 'light'), (1280, 'dark')]))
def test_the_look_of_samples(page, width, scheme):
    with shown(page, width, scheme, 860):
        page['#settings summary'].click()
        page.fill(prompt=PROMPT, n=2, max_tokens=30)
        page.go()
        check_look(page, scheme, 'label[for=prompt]', '#samples pre', '#samples .given', '#samples footer', '#go')


@contextmanager
def shown(page, width, scheme='light', height=800):
    """In a window of this width, in light or dark colours."""
    try:
        page.browser.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', {
            'width': width, 'height': height, 'deviceScaleFactor': 1, 'mobile': width < 500})
        page.browser.execute_cdp_cmd('Emulation.setEmulatedMedia', {
            'features': [{'name': 'prefers-color-scheme', 'value': scheme}]})
        yield
    finally:
        page.browser.execute_cdp_cmd('Emulation.clearDeviceMetricsOverride', {})
        page.browser.execute_cdp_cmd('Emulation.setEmulatedMedia', {'features': []})


def check_look(page, scheme, *selectors):
    assert page.browser.execute_script("""
        return [...document.querySelectorAll('html, section, #turns, .sample, .code')].every(
          element => element.scrollWidth <= element.clientWidth)""")
    for selector in selectors:
        ink, paper = page.browser.execute_script("""
            let element = document.querySelector(arguments[0]), ink = getComputedStyle(element).color
            while (getComputedStyle(element).backgroundColor === 'rgba(0, 0, 0, 0)') element = element.parentElement
            return [ink, getComputedStyle(element).backgroundColor]""", selector)
        bright, dim = sorted((luminance(ink), luminance(paper)), reverse=True)
        assert page[selector].is_displayed() and (bright + .05) / (dim + .05) >= 4.5, (selector, ink, paper)
    assert (luminance(page['body'].value_of_css_property('background-color')) < .1) == (scheme == 'dark')


def luminance(colour):
    """The relative luminance of 'rgb(r, g, b)', as WCAG defines it."""
    channels = [int(part) / 255 for part in colour.split('(')[1].rstrip(')').split(',')[:3]]
    linear = [c / 12.92 if c <= .04045 else ((c + .055) / 1.055) ** 2.4 for c in channels]
    return .2126 * linear[0] + .7152 * linear[1] + .0722 * linear[2]


def test_a_server_with_a_key_asks_for_it(browser):
    engine = drawing_engine()
    with serving(engine, api_key='secret') as client:
        page = Page(browser, client, engine)
        browser.get(str(client.base_url))
        page.wait(lambda: page['#key'].is_displayed() and 'needs its API key' in page.text('#status'))
        page.fill(key='secret')
        page.wait(lambda: page.text('#status') == 'connected')
        page.fill(prompt=PROMPT, max_tokens=5)
        page.go()
        assert all(len(text) == len(PROMPT) + 5 for text in page.samples())
        browser.get('about:blank')


def test_the_second_turn_finds_the_blocks_of_the_first(chat):
    """Turns stream, have the texts that the API gives for the same messages, and say what they found."""
    said = [dict(role='user', content='what is <b>a king</b>?')]
    chat.engine.allow(8)
    chat.say(said[0]['content'])
    chat.wait(lambda: chat.turns() and chat.turns()[1]['content'])
    blocks = chat.wait(lambda: [each['blocks'] for each in chat.client.get('/cache').json()['running']])[0]
    assert not chat.finished() and chat['#turns'].get_attribute('aria-busy') == 'true'
    chat.engine.allow(float('inf'))
    assert chat.is_answered(said) and not chat.all('.turn b')
    first = len(chat.tokenizer.conversation(chat.turns()[:1]))
    assert chat.text('.found') == f'0 of {first} prompt tokens found'

    said = [*chat.turns(), dict(role='user', content='and a queen?')]
    chat.engine.allow(8)
    chat.say('and a queen?')
    chat.wait(lambda: len(chat.turns()) == 4 and chat.turns()[3]['content'])
    chat.wait(lambda: {chat.squares()[i] for i in blocks[:first // 4]} == {'used'})  # by the second turn
    chat.engine.allow(float('inf'))
    assert chat.is_answered(said)
    found, of = (int(chat.all('.found')[1].text.split()[i]) for i in (0, 2))
    assert of == len(chat.tokenizer.conversation(said)) and first // 4 * 4 <= found < of


def test_a_turn_is_stopped_edited_and_repeated_and_the_page_asks_before_it_deletes_others(chat):
    chat.engine.allow(5)
    chat.say('one')
    chat.wait(lambda: chat.turns() and chat.turns()[1]['content'])
    chat['#stop'].click()
    chat.wait(lambda: chat.finished() and not chat.engine.live)
    assert chat.text('.turn footer span').endswith(', stopped') and not chat.text('#error')
    assert chat.focused() == 'message'
    chat.engine.allow(float('inf'))
    said = [*chat.turns(), dict(role='user', content='two')]
    chat.say('two')
    assert chat.is_answered(said)  # the part of an answer that has come is sent
    chat.ask('three')
    whole = chat.turns()
    chat['#message'].send_keys('a draft')
    assert chat.press('Repeat turn 2', 'dismiss') == 'This deletes the 1 turn behind this one.'
    assert chat.turns() == whole
    chat.press('Repeat turn 2', 'accept')
    assert chat.is_answered(said, seed=1337 + 1 + 1000)
    chat.ask('three')
    whole = chat.turns()
    assert len(whole) == 6
    chat['#message'].send_keys('a draft')
    chat.press('Edit turn 1')
    assert chat['#message'].get_property('value') == 'one' and len(chat.all('.turn.replaced')) == 3
    chat['#message'].send_keys(Keys.ESCAPE)
    assert not chat.all('.turn.replaced')
    chat.press('Edit turn 2')
    assert len(chat.all('.turn.replaced')) == 2
    chat.press('Cancel turn 2')
    assert chat['#message'].get_property('value') == 'a draft' and not chat.all('.turn.replaced')
    chat.press('Edit turn 1')
    chat.say('uno')
    assert chat.dialog('dismiss') == 'This deletes the 2 turns behind this one.'
    assert chat.turns() == whole and chat['#message'].get_property('value') == 'uno'
    chat['#go'].click()
    chat.dialog('accept')
    assert chat.is_answered([dict(role='user', content='uno')])
    assert chat['#message'].get_property('value') == 'a draft'

    chat.fill(max_tokens=255)
    chat.press('Repeat turn 1')
    assert chat.text('#error') and chat.turns()[0]['content'] == 'uno'
    chat.open()
    chat.wait(chat['#message'].is_displayed)
    assert chat['#message'].get_property('value') == 'a draft' and chat.turns()[0]['content'] == 'uno'
    chat.fill(max_tokens=20, system='be brief')
    uno = dict(role='user', content='uno')
    for seed in (2337, 3337):  # the last turn is repeated without a question
        chat.press('Repeat turn 1')
        assert chat.turns() == [uno, chat.answer([dict(role='system', content='be brief'), uno], seed=seed)]
    chat['#new'].click()
    assert not chat.turns()


MARKDOWN = """# A *heading* & more

Some **strong**, *slanted* and ~~struck~~ `code <b>`, and [a link](https://example.org/a?b=1&c=2 "title").
A second line.

> Quoted
> - and listed

3. Three
4. Four
   - nested
   - `more`

| left | right |
|:-----|------:|
| a | 1 |
| b \\| c | **2** |

---

1. in a list

2. with blank lines

3. of one kind

```python
def f(x):
    return x < 1 & True
```

A heading, underlined
---------------------
Then
- the last
"""


def test_an_answer_is_markdown(chat):
    """Its elements are another parser's, at any time. A selection stays, and what is read. Copy gives the text."""
    judge = pytest.importorskip('markdown_it').MarkdownIt('commonmark', dict(html=False, breaks=True, xhtmlOut=True))
    tags = {'h1': 'h3', 'h2': 'h4', 's': 'del'}  # where the page differs

    def expected(text):
        root = ElementTree.fromstring(f"<p>{judge.enable(['table', 'strikethrough']).render(text)}</p>")
        return [[tags.get(e.tag, e.tag), ''.join(''.join(e.itertext()).split()),
                 e.get('href') or e.get('start') or e.get('style', '').replace('text-align:', '')]
                for e in root.iter()][1:]

    def seen():
        return chat.browser.execute_script(r"""
            const text = document.querySelector('.turn:last-child .text').cloneNode(true)
            for (const head of text.querySelectorAll('.code > div')) head.remove()
            return [...text.querySelectorAll(':not(.code, .wide)')].map(e => [e.localName,
              e.textContent.replace(/\s/g, ''), e.getAttribute('href') ?? e.getAttribute('start') ?? e.align ?? ''])""")
    chat.hear('q')
    with shown(chat, 1280, height=500):
        cut = MARKDOWN.index('return')
        chat.speak(*MARKDOWN[:cut])
        assert seen() == expected(MARKDOWN[:cut])
        chat.browser.execute_script("""
            const text = document.querySelector('.text'), code = text.querySelector('.code code')
            getSelection().setBaseAndExtent(text.firstChild.firstChild, 2, code.firstChild, 8)
            document.querySelector('#turns').scrollTop = 40""")
        selected = chat.browser.execute_script('return String(getSelection())')
        end = MARKDOWN.index('- the last') + 1
        chat.speak(*MARKDOWN[cut:end])
        assert seen()[-1] == ['p', 'Then', '']  # and no heading
        chat.speak(*MARKDOWN[end:])
        assert chat.browser.execute_script("return document.querySelector('#turns').scrollTop") == 40
        assert chat.browser.execute_script('return String(getSelection())') == selected
    chat.speak(end='stop')
    assert seen() == expected(MARKDOWN)
    assert chat.turns() == [dict(role='user', content='q'), dict(role='assistant', content=MARKDOWN)]
    for clipboard in 'navigator.clipboard', 'undefined':
        chat.browser.execute_script(
            f"Object.defineProperty(navigator, 'clipboard', {{value: {clipboard}, configurable: true}})")
        for name, copied in ('Copy answer 1', MARKDOWN), ('Copy code', 'def f(x):\n    return x < 1 & True'):
            chat.press(name)
            chat.wait(lambda: chat['#message'].send_keys(Keys.CONTROL, 'av') or
                      chat['#message'].get_property('value') == copied)
    chat.open()
    chat.wait(chat['#turns'].is_displayed)
    assert seen() == expected(MARKDOWN) and chat['.text a'].get_attribute('rel') == 'noopener noreferrer'


HOSTILE = """<script>hacked = 1</script>
<img src=x onerror="hacked = 1"><svg onload="hacked = 1"><script>hacked = 1</script></svg>
<style>body { display: none }</style><meta http-equiv="refresh" content="0;url=/health">
<form action="/health"><input name=a><button autofocus onfocus="hacked = 1">go</button></form>
<iframe src="/health"></iframe><base href="https://example.org/"><p style="position:fixed" id="turns">over all</p>

[a](javascript:hacked=1) [b](JaVaScRiPt:hacked=1) [c](data:text/html,x) [d](vbscript:x) [e](/metrics)
<javascript:hacked=1> [f](https://example.org/"onmouseover="hacked=1) ![g](https://example.org/g.png)
![h](javascript:hacked=1) `<img src=x onerror=hacked=1>` [i][i] <kbd><img src=x onerror=hacked=1></kbd>

[i]: javascript:hacked=1

```"><img/src=x/onerror=hacked=1>
</code></pre><script>hacked = 1</script>
```

| <img src=x onerror=hacked=1> | <td onclick=hacked=1> |
|---|---|
| [x](javascript:hacked=1) | a<br>b |
"""


def test_thoughts_are_shown_before_the_answer_and_sent_back(chat):
    """Also after a reload. What was cut in its thoughts cannot go on."""
    chat.hear('q')
    chat.speak('Hm: **', '</pre>', field='reasoning_content')
    assert chat.visible('.thoughts summary') and chat.text('.thoughts summary') == 'Thinking …'
    assert not chat.all('.more:not([hidden])')
    chat.speak('*Yes*')
    assert chat.text('.thoughts summary') == 'Thoughts' and not chat['.thoughts div'].is_displayed()
    chat['.thoughts summary'].click()
    chat.speak(' so', field='reasoning_content')
    assert chat['.thoughts div'].is_displayed() and chat['.thoughts'].get_property('open')
    chat.speak('.', end='stop')
    for _ in range(2):
        assert chat.text('.thoughts div') == 'Hm: **</pre> so' and chat.text('.turn .text').strip() == 'Yes.'
        assert chat.turns() == [dict(role='user', content='q'), dict(
            role='assistant', content='*Yes*.', reasoning_content='Hm: **</pre> so')]
        chat.open()
    chat.hear('q')
    chat.speak('Hm', field='reasoning_content', end='length')
    assert chat.text('.turn:last-child footer span') == '2 tokens, cut off' and not chat.all('.more:not([hidden])')


def test_hostile_markdown_is_text(chat):
    """It makes no element but those of Markdown, and no request. What would pass is refused by the page's policy."""
    chat.hear('q')
    chat.speak(*HOSTILE.splitlines(keepends=True), end='stop')
    elements, names, links, text = chat.browser.execute_script("""
        const text = document.querySelector('.text'), all = [...text.querySelectorAll('*')]
        return [all.map(e => e.localName), all.flatMap(e => e.getAttributeNames()),
                [...text.querySelectorAll('[href]')].map(a => a.href), text.textContent]""")
    assert {*elements} <= {*'p br a code pre div span button table thead tbody tr th td'.split()}
    assert {*names} <= {*'class href target rel type tabindex role aria-label dir'.split()}
    assert links and all(each.startswith('https://example.org/') for each in links)
    assert all(each in text for each in ('<script>hacked = 1<', '<img src=x onerror=', '<style>body', '<meta', '[i]: '))
    refused = chat.browser.execute_async_script("""
        const seen = [], style = document.createElement('style')
        addEventListener('securitypolicyviolation', event => {
          if (seen.push(event.effectiveDirective) === 4) arguments[0](seen.sort()) })
        try { document.body.innerHTML = '' } catch { }
        style.append('body { display: none }')
        document.body.append(style, Object.assign(new Image(), {src: 'https://example.org/'}))
        fetch('https://example.org/').catch(() => {})""")
    assert refused == ['connect-src', 'img-src', 'require-trusted-types-for', 'style-src-elem']
    assert chat.browser.execute_script("""
        return window.hacked === undefined && performance.getEntriesByType('resource').every(
          entry => entry.name.startsWith(location.origin) || entry.name === 'https://example.org/')""")
    chat.browser.get_log('browser')  # it has these refusals


@pytest.mark.parametrize('text', sizes(['>' * 10**4 + 'x', 'word ' * 2 * 10**5], [
    '>' * 10**4 + 'x', '- ' * 10**4 + 'x', '1. ' * 10**4, '[' * 10**4, '![a](' * 4000, '*a ' * 10**4, '**a_' * 4500,
    'x `' * 10**4, '<a ' * 10**4, '| a ' * 4000 + '|\n' + '|-' * 4000 + '|\n', '~~~\n' + 'a line\n' * 10**4,
    'word ' * 2 * 10**5, f'some *words* and {"more " * 18}\n\n' * 10**4]), ids=lambda text: text[:6])
def test_an_answer_may_be_of_any_size_and_depth(chat, text):
    """It is shown in time, and is kept and sent as it came."""
    chat.hear('q')
    began = time.monotonic()
    chat.speak(text)
    chat.speak(' end', end='stop')
    assert chat.text('.text').rstrip().endswith('end') and time.monotonic() - began < 10
    assert chat.turns()[1]['content'] == text + ' end'


def test_chats_are_kept_renamed_exported_and_deleted(chat, tmp_path):
    """Over a reload, for other tabs, and by keyboard. An exported chat is a body for the API."""
    def names():
        return [name.text for name in chat.all('#list .name')]
    chat.browser.execute_cdp_cmd('Browser.setDownloadBehavior', dict(behavior='allow', downloadPath=str(tmp_path)))
    chat.fill(system='be brief')
    chat.ask('the first question')
    first = chat.turns()
    chat['#new'].send_keys(Keys.ENTER)
    assert not chat.turns() and chat.focused() == 'message'
    chat.ask('another <i>question</i>')
    second = chat.turns()
    chat['#shelf summary'].send_keys(Keys.ENTER)
    chat.wait(lambda: names() == ['another <i>question</i>', 'the first question'])
    chat.paste('system', 'another')
    for end, then in (('dismiss', 'the first question'), ('accept', 'A name')):
        chat.press('Rename the first question', end, 'A name')
        assert names()[1] == then
    assert chat.browser.switch_to.active_element.text == 'A name'
    chat.open()
    chat.wait(lambda: names() == ['another <i>question</i>', 'A name'])
    assert chat.turns() == second

    chat.all('#list .name')[1].send_keys(Keys.ENTER)
    assert chat.turns() == first and chat['#system'].get_property('value') == 'be brief'
    chat.press('Export A name')
    chat.wait((tmp_path / 'A-name.json').exists)
    body = json.loads((tmp_path / 'A-name.json').read_text())
    assert body == {'messages': [dict(role='system', content='be brief'), *first]}
    assert chat.client.post('/v1/chat/completions', json=body).status_code == 200
    for end in ('dismiss', 'accept'):
        assert chat.turns() == first and names() == ['A name', 'another <i>question</i>']
        assert chat.press('Delete A name', end) == 'Delete “A name”?'
    assert not chat.turns() and names() == ['another <i>question</i>'] and chat.focused() == 'message'

    with second_tab(chat):
        chat.wait(lambda: names() == ['another <i>question</i>'])
        assert not chat.turns()
        chat.press('Delete another <i>question</i>', 'accept')
        assert not names() and chat.focused() == 'new'
    chat.wait(lambda: not names())


@contextmanager
def second_tab(chat):
    """A tab beside this one, which shows the names of chats. Yields a function that goes to a tab, number 0 or 1."""
    one = chat.browser.current_window_handle
    chat.browser.switch_to.new_window('tab')
    tabs = one, chat.browser.current_window_handle
    try:
        chat.open()
        chat['#shelf summary'].click()
        yield lambda number: chat.browser.switch_to.window(tabs[number])
    finally:
        chat.browser.switch_to.window(tabs[1])
        chat.browser.close()
        chat.browser.switch_to.window(one)


def test_a_chat_goes_on_in_two_tabs(chat):
    """What was said in one while the other had an answer is lost in neither: the later writer goes on as a new chat."""
    chat.ask('first')
    begun = chat.turns()
    chat['#shelf summary'].click()
    with second_tab(chat) as go_to:
        chat.wait(lambda: chat.all('#list .name'))[0].click()
        assert chat.turns() == begun
        chat.engine.allow(3)
        chat.say('long')
        chat.wait(lambda: len(chat.turns()) == 4 and chat.turns()[3]['content'])
        go_to(0)
        chat.wait(lambda: len(chat.turns()) == 4)
        chat.say('short')
        chat.engine.allow(float('inf'))
        chat.wait(lambda: len(chat.turns()) == 6 and chat.finished())
        in_one = chat.turns()
        go_to(1)
        chat.wait(chat.finished)
        in_two = chat.turns()
        assert [turn['content'] for turn in in_two[::2]] == ['first', 'long'] and in_two[3]['content']
    chat.wait(lambda: len(chat.all('#list .name')) == 2)
    assert chat.turns() == in_one and [turn['content'] for turn in in_one[::2]] == ['first', 'long', 'short']
    chat.all('#list .name')[1].click()
    chat.wait(lambda: chat.turns() == in_two)


def test_a_reload_shows_what_another_tab_has_written(chat):
    """Also where this one had a turn open, and so did not show it before."""
    chat.ask('first')
    with second_tab(chat) as go_to:
        chat.wait(lambda: chat.all('#list .name'))[0].click()
        chat.press('Edit turn 1')
        go_to(0)
        chat.ask('second')
        both = chat.turns()
        go_to(1)
        assert len(chat.turns()) == 2
        chat.open()
        chat.wait(lambda: chat.turns() == both)


@pytest.mark.parametrize('why, refuse', [
    ('storage is full', "for (let n = 2 ** 22; n >= 1; n /= 2) try { localStorage[n] = 'x'.repeat(n) } catch { }"),
    ('no storage', "Object.defineProperty(window, 'localStorage', {get() { throw new Error() }})")])
def test_a_browser_that_keeps_no_more_chats(chat, why, refuse):
    """The page says so, goes on, and asks before a chat is lost."""
    script = chat.browser.execute_cdp_cmd('Page.addScriptToEvaluateOnNewDocument', {'source': refuse})
    try:
        chat.open()
        chat.say('one')
        assert chat.is_answered([dict(role='user', content='one')]) and why in chat.text('#unkept')
        whole = chat.turns()
        for end in ('dismiss', 'accept'):
            assert chat.turns() == whole and why in chat.text('#unkept')
            chat['#new'].click()
            assert chat.dialog(end).endswith('Its newest turns will be lost.')
        assert not chat.turns() and not chat.text('#unkept')
    finally:
        chat.browser.execute_cdp_cmd('Page.removeScriptToEvaluateOnNewDocument', script)


def test_a_chat_with_the_keyboard_and_a_reload(chat):
    for blanks in ('   ', ' \n\t '):
        chat.paste('message', blanks)
        chat['#message'].send_keys(Keys.ENTER)
        assert not chat.turns() and chat.finished() and not chat.engine.live
    chat['#message'].send_keys('a', Keys.SHIFT, Keys.ENTER, Keys.NULL, 'b', Keys.ENTER)
    assert chat.is_answered([dict(role='user', content='a\nb')])
    chat.engine.allow(5)
    chat.say('two')
    chat.wait(lambda: len(chat.turns()) == 4 and chat.all('.turn footer')[1].text.startswith('5 tokens'))
    before, footer = chat.turns(), chat.text('.turn footer')
    chat.fill(seed=9)
    chat.open()
    chat.wait(lambda: chat['#turns'].is_displayed())
    assert chat.turns() == before and chat.all('.turn footer')[1].text.startswith('5 tokens, not finished')
    assert chat.text('.turn footer') == footer and chat['#seed'].get_property('value') == '9'
    chat.wait(lambda: not chat.engine.live)  # the request of the page that is gone ends
    chat.engine.allow(float('inf'))

    chat['h1'].click()
    assert chat.tab(18) == [
        'Chats a b', 'New chat', 'Conversation', 'Edit turn 1', 'Copy answer 1', 'Repeat turn 1', 'Edit turn 2',
        'Copy answer 2', 'Go on with answer 2', 'Repeat turn 2', 'Message', 'Send',
        'Settings temperature 0.8, top p 1, 20 tokens', 'Temperature', 'Top p', 'Seed', 'Tokens', 'System message']


def test_an_answer_says_how_much_of_its_prompt_is_read(chat, monkeypatch):
    """Also while the stream has comments. If it is stopped there, the message comes back."""
    monkeypatch.setattr('serving.answer.SILENCE', .1)
    monkeypatch.setattr(chat.engine.engine.scheduler, 'budget', 32)
    chat.engine.allow(0)
    message = 'a rather long message, ' * 6
    chat.say(message)
    n = len(chat.tokenizer.conversation([dict(role='user', content=message)]))
    chat.wait(lambda: chat.engine.live)
    assert chat.text('.turn footer span') == 'waiting' and n > 3 * 32
    for k in range(1, n // 32):
        chat.engine.step()
        chat.wait(lambda: chat.text('.turn footer span') == f'reading {32 * k} of {n} tokens')
        assert chat.client.get('/cache').json()['running'][0]['computed'] == 32 * k
        assert chat.text('#running li span').startswith('this page') and not chat.turns()[1]['content']
    chat['#stop'].click()
    chat.wait(chat.finished)
    assert not chat.turns() and chat['#message'].get_property('value') == message and not chat.text('#error')
    chat.engine.allow(float('inf'))
    chat['#go'].click()
    assert chat.is_answered([dict(role='user', content=message)])
    assert chat.text('.turn footer span') == '20 tokens, cut off'


def test_an_answer_that_was_cut_goes_on(chat):
    """It becomes the beginning of what the API says after it; one that cannot go on stays as it is."""
    goes_on = dict(continue_final_message=True, add_generation_prompt=False)
    chat.say('one')
    assert chat.is_answered([dict(role='user', content='one')])
    for n in (20, 40):
        asked, part = chat.turns()
        more = chat.answer([asked, part], seed=1337 + n, **goes_on)['content']
        chat.press('Go on with answer 1')
        assert chat.turns() == [asked, {**part, 'content': part['content'] + more}] and more
        assert chat.text('.turn footer span') == f'{n + 20} tokens, cut off' and chat.focused() == 'message'
    whole = chat.turns()
    chat.fill(max_tokens=250)
    chat.press('Go on with answer 1')
    assert chat.text('#error') and chat.turns() == whole and chat.text('.turn footer span') == '60 tokens, cut off'
    chat.fill(max_tokens=20)
    chat.ask('two')
    assert [more.is_displayed() for more in chat.all('.more')] == [False, True]  # the first has a turn after it


def test_a_sample_that_was_cut_goes_on(page):
    page.fill(prompt=PROMPT, seed=3, n=2, max_tokens=10)
    page.go()
    first, second = page.samples()
    page.press('Go on with sample 2')
    assert page.samples() == [first, *page.answers(prompt=second, seed=3 + 1 + 10, max_tokens=10)]
    assert [note.text for note in page.all('.sample footer span:first-child')] == [
        '10 tokens, cut off', '20 tokens, cut off']
    kept = page.samples()
    page.open()
    page.wait(page['#samples'].is_displayed)
    assert page.samples() == kept and page.all('.sample footer span')[0].text == '10 tokens, cut off'
    page.press('Go on with sample 1')
    assert page.samples() == [*page.answers(prompt=first, seed=3 + 10, max_tokens=10), kept[1]]


def cut_off(page, offline):
    """Let the browser reach no server, and end the connections that there are; or let it reach them again."""
    page.browser.execute_cdp_cmd('Network.enable', {})
    page.browser.execute_cdp_cmd('Network.emulateNetworkConditions', {
        'offline': offline, 'latency': 0, 'downloadThroughput': -1, 'uploadThroughput': -1})
    for connection in [*page.client.process.server_state.connections]:
        page.client.process.loop.call_soon_threadsafe(connection.transport.abort)


def test_a_server_that_is_gone(chat):
    """What has come stays, the pane shows nothing old, the errors are the page's own; and then it is back."""
    chat.engine.allow(5)
    chat.say('one')
    chat.wait(lambda: chat.turns() and chat.text('.turn footer span') == '5 tokens …')
    chat.wait(lambda: chat.text('#n-running') == '1')
    try:
        cut_off(chat, True)
        chat.wait(lambda: chat.text('#status') == 'not connected' and chat.finished())
        assert 'connection to the server was lost' in chat.text('#error') and chat.visible('#error')
        assert chat.text('#n-running') == '–' and not chat.all('#running li') and chat.text('#size') == 'not connected'
        assert chat.text('.turn footer span') == '5 tokens, not finished' and chat['.more'].is_displayed()
        chat.say('two')
        chat.wait(lambda: 'cannot be reached' in chat.text('#error') and chat.finished())
        assert 'fetch' not in chat.text('#error') and chat.visible('#error')
        assert len(chat.turns()) == 2 and chat['#message'].get_property('value') == 'two'
    finally:
        cut_off(chat, False)
    chat.wait(lambda: chat.text('#status') == 'connected')
    chat.engine.allow(float('inf'))
    said = [*chat.turns(), dict(role='user', content='two')]
    chat['#go'].click()
    assert chat.is_answered(said) and chat.text('#n-running') != '–' and not chat.text('#error')


def test_while_a_chat_model_loads(browser):
    """Nothing can be written yet; then the chat is there with the model's defaults, and the keyboard in its field."""
    tokenizer = JSONTokenizer(json_tokenizer(TEXT).json, chat_template=TEMPLATE)
    engine, there = drawing_engine(tokenizer), threading.Event()
    served = replace(served_by(engine, tokenizer=tokenizer), defaults={'temperature': .3, 'top_k': 5})
    with serving(engine, load=lambda: there.wait() and (engine, served)) as client:
        page = Page(browser, client, engine)
        browser.get(str(client.base_url))
        page.wait(lambda: 'being loaded' in page.text('#loading'))
        assert page.text('#status') == 'loading the model' and page['#loading'].is_displayed()
        assert not any(field.is_displayed() for field in page.all('textarea, input, button'))
        there.set()
        page.wait(lambda: page.text('#status') == 'connected')
        assert page.focused() == 'message' and page['#go'].text == 'Send'
        assert not page['#prompt'].is_displayed() and not page['#loading'].is_displayed()
        assert page['#temperature'].get_property('value') == '0.3' and page.text('output[for=temperature]') == '0.30'
        browser.get('about:blank')
